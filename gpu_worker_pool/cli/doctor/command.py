"""`gpu-pool doctor`: check everything that can be wrong, and say what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Console, Text, out, print_json
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.table import show_beside

from .finding import Check, Finding, complaints

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
        summary = f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}"
        console.print(Text(summary, style=STYLES["problem" if problems else "ok"]))
    return 1 if problems else 0


def _show(console: Console, finding: Finding) -> None:
    status = Text(f"  {finding.status:<8}", style=STYLES[finding.status])
    show_beside(console, status.append(f" {finding.check:<16} "), finding.message)
    if finding.advice:
        show_beside(console, Text(f"{'':<28}-> "), finding.advice)


def _number(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


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
