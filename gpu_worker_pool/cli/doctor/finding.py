"""What a check found, and how checks are run: none may end the others, by raising or by hanging."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from gpu_worker_pool.cli.output import WarningHandler, plain
from gpu_worker_pool.failure import Failure

Status = Literal["ok", "warning", "problem", "skipped"]

# A reading by nvidia-smi runs it twice, each for at most 10 s. A driver may hang for ever.
LONGEST_S = 30.0
# How the settings complain of a file that they did not read.
LOST_FILE = ".env cannot be read"


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
    """A check by its name. `find` yields what it found, which may be nothing."""

    name: str
    find: Callable[[], Iterable[Finding]]

    def run(self, limit_s: float = LONGEST_S) -> list[Finding]:
        """Its findings, in plain text for a terminal. A check that raises or hangs is a finding itself.

        What hangs cannot be interrupted, and is left behind in a daemon thread.
        """
        result: Future[list[Finding]] = Future()

        def find() -> None:
            try:
                result.set_result(list(self.find()))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                result.set_exception(error)

        threading.Thread(target=find, daemon=True).start()
        try:
            found = result.result(limit_s)
        except Failure as failure:
            found = [Finding(self.name, "problem", str(failure))]
        except TimeoutError:
            text = f"it did not end within {limit_s:g} s: a driver, a disk or a server hangs"
            found = [Finding(self.name, "problem", text, "see dmesg, or try `nvidia-smi` and `df` by hand")]
        except Exception as error:  # noqa: BLE001 - one check must not end the others
            words = f"this check failed: {type(error).__name__}: {error}"
            found = [Finding(self.name, "problem", words, "this is a fault of gpu-pool doctor: please report it")]
        return [replace(item, message=plain(item.message), advice=item.advice and plain(item.advice)) for item in found]


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collects what our own code warns of meanwhile, and keeps it from the terminal: settings complain in the log."""
    heard: list[str] = []
    logger = logging.getLogger("gpu_worker_pool")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [WarningHandler(heard.append)], False
    try:
        yield heard
    finally:
        logger.handlers, logger.propagate = before


def judge_settings(side: Literal["server", "client"], heard: Sequence[str]) -> Iterator[Finding]:
    """Values in the environment or in .env that a server or a client cannot use."""
    check = f"{side}-settings"
    if not heard:
        yield Finding(check, "ok", f"the {side}'s settings can be used")
    for words in heard:
        is_file = words.startswith(LOST_FILE)
        how = "correct that file or move it away: lines of NAME=value, in UTF-8" if is_file else "correct or unset it"
        yield Finding(check, "problem", words, how)
