"""Values of options that typer need not convert. To convert any value, even one that is not given, typer loads pydantic,
which takes a fifth of the time of a short command.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class PlainValues:
    """Stands in for typer's conversion of one parameter, and loads that only for a value that is not plain."""

    def __init__(self, param: Any) -> None:
        self._load = param.get_runtime_param
        self._wanted = param.type_descriptor.annotation
        self._has_parser = param.type_descriptor.parameter_info.parser is not None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as the command gets it."""
        wanted = self._wanted
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        # A number is a default: one that was typed is text, and is converted.
        if type(value) is wanted and wanted in {int, float}:
            return value
        if not self._has_parser:
            if wanted is str and isinstance(value, str):
                return value
            if wanted == list[str] and isinstance(value, list | tuple) and all(type(item) is str for item in value):
                return list(value)
            if isinstance(wanted, type) and issubclass(wanted, Enum) and value in {member.value for member in wanted}:
                return wanted(value)
        return self._load().coerce(value, param=param, ctx=ctx)


def spare_conversion(param: Any) -> None:
    """Let typer convert a value of this parameter only if it is not plain. Older versions of typer do without pydantic."""
    if hasattr(param, "get_runtime_param") and "get_runtime_param" not in vars(param):
        plain = PlainValues(param)
        param.get_runtime_param = lambda: plain
