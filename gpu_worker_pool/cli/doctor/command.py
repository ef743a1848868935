"""`gpu-pool doctor`: check everything that can be wrong, and say what to do. No check may end the others, by raising or by hanging."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Console, Text, WarningHandler, out, plain, print_json
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.table import show_beside
from gpu_worker_pool.cli.units import count
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


# --- the command ------------------------------------------------------------------------------------------------------

ASK_S = 5.0
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


def doctor(endpoint: Endpoints = None, json: Json = False) -> int:
    """Check this machine and the servers it uses, and say what to do.

    It looks at the driver, the GPUs, the port, the endpoints and the settings, and changes nothing. Ends with 1 if there is
    a problem, else with 0.
    """
    with complaints() as heard:
        servers = Servers(endpoint, timeout_s=ASK_S)
    console = None if json else out()
    findings: list[Finding] = []
    for title, checks in _sections(servers, heard):
        if console is not None:
            console.print(Text(title, style="bold"))
        for finding in (found for check in checks for found in check.run()):
            findings.append(finding)
            if console is not None:
                _show(console, finding)
    counts = Counter(finding.status for finding in findings)
    problems, warnings = counts["problem"], counts["warning"]
    if console is None:
        listed = [asdict(finding) for finding in findings]
        print_json("doctor", {"is_ok": not problems, "problems": problems, "warnings": warnings, "findings": listed})
    else:
        summary = f"{count(problems, 'problem')}, {count(warnings, 'warning')}"
        console.print(Text(summary, style=STYLES["problem" if problems else "ok"]))
    return 1 if problems else 0


def _show(console: Console, finding: Finding) -> None:
    status = Text(f"  {finding.status:<8}", style=STYLES[finding.status])
    show_beside(console, status.append(f" {finding.check:<16} "), finding.message)
    if finding.advice:
        show_beside(console, Text(f"{'':<28}-> "), finding.advice)


def _sections(servers: Servers, heard: list[str]) -> Iterator[tuple[str, list[Check]]]:
    # Loaded here, so that no other command waits for them.
    from . import client, machine  # noqa: PLC0415

    yield "This machine and its GPUs", machine.checks()
    try:
        from . import server  # noqa: PLC0415 - its packages may be missing
    except ModuleNotFoundError as error:
        text = f"this machine cannot be a server: {error.name} is not installed"
        how = "to make it one: pip install 'gpu-worker-pool[server]'"
        missing = Finding("server-packages", "skipped", text, how)
        yield "As a server", [Check("server-packages", lambda: [missing])]
    else:
        yield "As a server", server.checks()
    yield "As a client", client.checks(servers, heard)
