"""From the types of the pool to the bodies of the wire, and to JSON."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

from pydantic_core import to_json


def encode(value: Any) -> bytes:
    """Encode as JSON, without a type of its own: dataclasses by their fields; infinities and NaN become null."""
    return to_json(value, inf_nan_mode="null")


def shared_fields(kind: type, source: object) -> dict[str, Any]:
    """The fields of this dataclass that its source has by the same names."""
    return {name: getattr(source, name) for name in _shared_names((kind, type(source)))}


@lru_cache(maxsize=256)
def _shared_names(of: tuple[Any, type]) -> tuple[str, ...]:
    kind, source = of
    return tuple(field.name for field in fields(kind) if hasattr(source, field.name))
