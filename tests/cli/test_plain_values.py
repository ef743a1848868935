"""What typer need not convert reaches a command as if typer had converted it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from gpu_worker_pool.cli.app import commands
from gpu_worker_pool.cli.plain_values import PlainValues


def parameters(command: Any, context: Any = None) -> Iterator[tuple[Any, Any]]:
    context = context or command.make_context("gpu-pool", ["status"], resilient_parsing=True)
    for param in command.get_params(context):
        yield param, context
    for inner in getattr(command, "commands", {}).values():
        yield from parameters(inner, type(context)(inner, parent=context))


PARAMETERS = list(parameters(typer.main.get_command(commands())))
TYPED = ("", "3", "2.5", "text", "stop", "warn", "active", "-1")


def made(convert: Any, value: Any, param: Any, context: Any) -> Any:
    try:
        found = convert.coerce(value, param=param, ctx=context)
    except typer.BadParameter as error:
        return str(error)
    return type(found), found


@pytest.mark.parametrize("value", [None, *TYPED, *((typed, "another") for typed in TYPED)], ids=repr)
def test_every_option_has_the_value_that_typer_makes(value: Any) -> None:
    for param, context in PARAMETERS:
        is_list = param.multiple or param.nargs == -1
        if value is None or is_list == isinstance(value, tuple):
            ours, typers = param.get_runtime_param(), type(param).get_runtime_param(param)
            assert isinstance(ours, PlainValues)
            assert made(ours, value, param, context) == made(typers, value, param, context), param.name


def test_every_default_is_what_typer_makes_of_it() -> None:
    for param, context in PARAMETERS:
        default = param.get_default(context)
        ours, typers = param.get_runtime_param(), type(param).get_runtime_param(param)
        assert made(ours, default, param, context) == made(typers, default, param, context), param.name


# Nothing listens there.
ENDPOINT = ("-e", "http://127.0.0.1:1")


@pytest.mark.parametrize("command", [("status",), ("leases", "--mine"), ("run", "true")], ids=" ".join)
def test_a_short_command_does_without_pydantic_and_other_commands(command: tuple[str, ...]) -> None:
    name, *rest = command
    heavy = {"pydantic", "gpu_worker_pool.cli.commands.report", "gpu_worker_pool.cli.top.command"}
    program = (
        f"import sys; from gpu_worker_pool.__main__ import main; main(); sys.exit(bool({heavy} & set(sys.modules)))"
    )
    started = [sys.executable, "-c", program, name, *ENDPOINT, *rest]
    done = subprocess.run(started, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot connect" in done.stderr
