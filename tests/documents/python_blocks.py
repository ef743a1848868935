"""Runs Python blocks in this process: starting another one for each would take most of the time."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import logging
import re
from collections.abc import Iterator
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from tests.documents.blocks import Block, Chain

MOST_S = 30.0


def run_chain(chain: Chain) -> None:
    """Run the blocks one after the other, as in `python -m asyncio`; each must print what it says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with _as_in_a_new_process(), asyncio.Runner() as runner:
        try:
            for block in chain:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    _run(block, names, runner)
                assert_printed(block, printed.getvalue().splitlines())
        finally:
            # Where one fails, what is seen is that one, and not all that it left open.
            for client in [left for left in names.values() if isinstance(left, GPUWorkerPoolClient)]:
                runner.run(client.stop())


@contextlib.contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """The log of the package as it is when nobody has set it up; a server in this process may have."""
    logger = logging.getLogger("gpu_worker_pool")
    before = (logger.level, logger.handlers[:], logger.propagate)
    logger.level, logger.handlers, logger.propagate = logging.NOTSET, [], True
    try:
        yield
    finally:
        logger.level, logger.handlers, logger.propagate = before


def _run(block: Block, names: dict[str, Any], runner: asyncio.Runner) -> None:
    # Lines are counted as in the document, so that a traceback points there.
    text = "\n" * block.line + block.text
    code = compile(text, block.document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(_within(eval(code, names)))  # noqa: S307 - our own document
    else:
        exec(code, names)  # noqa: S102 - our own document


async def _within(awaitable: Any) -> None:
    async with asyncio.timeout(MOST_S):
        await awaitable


def promised(block: Block) -> list[str]:
    return [line.removeprefix("# ") for line in block.text.splitlines() if line.startswith("# ")]


def assert_printed(block: Block, lines: list[str]) -> None:
    wanted = promised(block)
    fits = len(lines) == len(wanted) and all(map(_fits, wanted, lines))
    assert fits, f"{block} printed {lines}, and says {wanted}"


def _fits(wanted: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), line) is not None
