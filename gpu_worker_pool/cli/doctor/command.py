"""`gpu-pool doctor`: check everything that can be wrong, and say what to do."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import out, print_json
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.pools.side_by_side import show_beside

from .finding import Check, Finding, Status, complaints

if TYPE_CHECKING:
    from .client import EndpointFacts
    from .gpus import GpuFacts

ASK_S = 5.0
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}
CheckSection = tuple[str, list[Check]]


def doctor(endpoint: Endpoints = None, json: Json = False) -> int:
    """Look at the driver, the GPUs, the ports, the endpoints and the settings, and say what to do.

    Ends with 0 where there is no problem, and with 1 where there is one; a warning is none.
    """
    with complaints() as heard:
        servers = Servers(endpoint, timeout_s=ASK_S)
    console = None if json else out()
    findings: list[Finding] = []
    for title, checks in _sections(servers, endpoint, heard):
        if console is not None:
            console.print(Text(title, style="bold"))
        for check in checks:
            for finding in check.run():
                findings.append(finding)
                if console is not None:
                    _show(console, finding)
    counts = Counter(finding.status for finding in findings)
    if console is None:
        data = {"problems": counts["problem"], "warnings": counts["warning"]}
        print_json(
            "doctor", {"is_ok": not counts["problem"], **data, "findings": [asdict(found) for found in findings]}
        )
    else:
        console.print(Text(_summary(counts), style=STYLES["problem" if counts["problem"] else "ok"]))
    return 1 if counts["problem"] else 0


def _show(console: Console, finding: Finding) -> None:
    status = Text(f"  {finding.status:<8}", style=STYLES[finding.status])
    show_beside(console, status + Text(f" {finding.check:<16} ", style="default"), Text(finding.message))
    if finding.advice:
        show_beside(console, Text(f"{'':<28}-> "), Text(finding.advice, style="italic"))


def _summary(counts: Counter[Status]) -> str:
    def number(status: Status) -> str:
        return f"{counts[status] or 'no'} {status}{'' if counts[status] == 1 else 's'}"

    return f"{number('problem')}, {number('warning')}"


# --- which checks there are, in their order ------------------------------------------------------------------------


# The modules of the checks are loaded here, so that no other command waits for them.


def _sections(servers: Servers, given: list[str] | None, heard: list[str]) -> Iterator[CheckSection]:
    from .gpus import GpuFacts  # noqa: PLC0415

    facts = GpuFacts()
    yield "This machine and its GPUs", _gpu_checks(facts)
    yield "As a server", _server_checks(servers, facts)
    yield "As a client", _client_checks(servers, given, heard)


def _gpu_checks(facts: GpuFacts) -> list[Check]:
    from . import gpus  # noqa: PLC0415

    environ = os.environ
    return [
        Check("python", gpus.judge_python),
        Check("boot-clock", gpus.check_boot_clock),
        Check("driver", lambda: gpus.judge_driver(facts.driver, facts.nvml, facts.smi)),
        Check("nvml", lambda: gpus.judge_nvml(facts.driver, facts.nvml, facts.smi)),
        Check("nvidia-smi", lambda: gpus.judge_nvidia_smi(facts.driver, facts.nvml, facts.smi)),
        Check(
            "visible-devices",
            lambda: gpus.judge_visible_devices(environ.get("CUDA_VISIBLE_DEVICES"), facts.readings),
        ),
        Check("device-order", lambda: gpus.judge_device_order(environ.get("CUDA_DEVICE_ORDER"), facts.readings)),
    ]


def _server_checks(servers: Servers, facts: GpuFacts) -> list[Check]:
    try:
        from . import server  # noqa: PLC0415 - its packages may be missing
    except ModuleNotFoundError as error:
        missing = Finding(
            "server-packages",
            "skipped",
            f"this machine cannot be a server: {error.name} is not installed",
            "only if it is to be one: pip install 'gpu-worker-pool[server]'",
        )
        return [Check("server-packages", lambda: missing)]
    from .client import is_client_only  # noqa: PLC0415

    settings, heard = server.load_settings()
    is_no_server = is_client_only(servers.config)
    return [
        Check("server-settings", lambda: server.judge_settings(heard)),
        Check("simulated", lambda: server.judge_simulated(settings.simulated_gpus, has_gpus=bool(facts.readings))),
        Check("port", lambda: server.judge_port(server.Port.of(settings), is_client_only=is_no_server)),
        Check("state-dir", lambda: server.check_state_dir(settings)),
        Check("tokens", lambda: server.check_tokens(settings, heard)),
        Check("pidfd", server.check_pidfd),
    ]


def _client_checks(servers: Servers, given: list[str] | None, heard: list[str]) -> list[Check]:
    from . import client  # noqa: PLC0415

    config = servers.config
    memory, utilization = config.asked_memory_threshold, config.asked_utilization_threshold
    urls = [endpoint.url for endpoint in config.endpoints.values()]
    return [
        Check("client-settings", lambda: client.judge_settings(heard)),
        Check("thresholds", lambda: client.judge_own_thresholds(memory, utilization)),
        Check("endpoints", lambda: client.judge_variables(os.environ, given, urls)),
        Check("endpoint", lambda: endpoint_findings(servers, is_wanted=client.is_wanted(os.environ, given))),
    ]


def endpoint_findings(servers: Servers, *, is_wanted: bool) -> list[Finding]:
    """Asks the servers, and judges their answers."""
    from . import client  # noqa: PLC0415

    async def ask() -> list[EndpointFacts]:
        async with servers:
            return await client.ask_all(servers)

    config = servers.config
    try:
        asked = asyncio.run(ask())
    except Failure as failure:  # no server was asked: the certificates cannot be used
        how = "set GPU_POOL_CA_FILE to a file with the certificate of your authority, in PEM format, or unset it"
        return [Finding("endpoint", "problem", str(failure), how)]
    found: list[Finding | None] = []
    for facts in asked:
        found += [
            client.judge_reachable(facts, is_wanted=is_wanted),
            client.judge_right(facts),
            client.judge_open_token(facts),
            client.judge_clock(facts),
            *client.judge_thresholds(facts, config.asked_memory_threshold, config.asked_utilization_threshold),
        ]
    return [finding for finding in found if finding is not None]
