"""What a check found, and how checks are run: none may end the others, by raising or by hanging."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.output import plain

Status = Literal["ok", "warning", "problem", "skipped"]
T = TypeVar("T")

# Each check has its own bounds. This one is for what they do not cover.
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. `advice` says what to do, where there is something to do; `endpoint` is the one it is about."""

    check: str
    status: Status
    message: str
    advice: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name. `find` returns one finding, several, or None where it has nothing to say."""

    name: str
    find: Callable[[], Finding | Sequence[Finding] | None]

    def run(self, limit_s: float = LONGEST_S) -> list[Finding]:
        """Its findings, in plain text: they quote servers, drivers and variables, and go to a terminal. A check that
        raises or hangs is a finding itself.
        """
        return [
            replace(found, message=plain(found.message), advice=None if found.advice is None else plain(found.advice))
            for found in self._found(limit_s)
        ]

    def _found(self, limit_s: float) -> Sequence[Finding]:
        try:
            found = within(limit_s, self.find)
        except Failure as failure:
            return [Finding(self.name, "problem", str(failure))]
        except Exception as error:  # noqa: BLE001 - one check must not end the others
            words = f"this check failed: {type(error).__name__}: {error}"
            return [Finding(self.name, "problem", words, "this is a fault of gpu-pool doctor: please report it")]
        if found is None:
            return []
        return [found] if isinstance(found, Finding) else found


class TookTooLong(Exception):  # noqa: N818 - what happened
    """The work did not end in time."""


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Do this, or raise TookTooLong. Work that hangs is left behind in a daemon thread: a driver or a network file
    system that hangs cannot be interrupted.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    worker = threading.Thread(target=do, daemon=True)
    worker.start()
    worker.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TookTooLong(f"it did not end within {limit_s:g} s")
    return results[0]


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collects the warnings and errors that our own code logs meanwhile, and keeps them from the terminal: settings
    complain in the log.
    """
    heard: list[str] = []

    class WarningListener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("gpu_worker_pool")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [WarningListener(logging.WARNING)], False
    try:
        yield heard
    finally:
        logger.handlers, logger.propagate = before
