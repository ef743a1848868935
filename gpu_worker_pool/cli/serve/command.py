"""`gpu-pool serve`: its flags, each of which is a setting of the server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import gpu_worker_pool
from gpu_worker_pool.cli.failure import FAILED, Failure
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import out, print_json, stop_printing
from gpu_worker_pool.cli.table import show_beside
from gpu_worker_pool.cli.units import parse_duration_s
from gpu_worker_pool.config import PLURAL_VARIABLES, SINGULAR_VARIABLE
from gpu_worker_pool.host.addresses import is_every_address, is_this_machine, names_of_this_machine, urls

from .announcement import Announcement, GpusShown, Writing, count_gpus
from .port_holder import find_server

if TYPE_CHECKING:
    import socket

    from gpu_worker_pool.server.app import PoolApp
    from gpu_worker_pool.server.settings import ServerSettings

logger = logging.getLogger(__name__)

# The settings that have a flag, with the flag.
FLAGS = {
    "host": "--host",
    "port": "--port",
    "simulated_gpus": "--simulated-gpus",
    "cuda_visible_devices": "--visible-devices",
    "gpu_pool_state_dir": "--state-dir",
    "gpu_pool_tokens_file": "--tokens-file",
    "gpu_memory_threshold_percent": "--memory-threshold",
    "gpu_utilization_threshold_percent": "--utilization-threshold",
    "gpu_pool_workers_per_gpu": "--workers-per-gpu",
    "gpu_pool_drain_limit": "--drain-limit",
    "refresh_interval": "--refresh-interval",
    "gpu_pool_durability": "--durability",
    "gpu_pool_node": "--node",
    "log_level": "--log-level",
    "access_log": "--access-log",
}

_GPUS = "Which GPUs"
_LEASES = "Leases"


def serve(
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The address to listen on; by default 0.0.0.0, all addresses. [HOST]"),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="By default 8000; 0 takes a free port. [PORT]")
    ] = None,
    simulated_gpus: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            rich_help_panel=_GPUS,
            help="Simulate GPUs: 4, or 4xA100-80GB,4xT4. [SIMULATED_GPUS]",
        ),
    ] = None,
    visible_devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", rich_help_panel=_GPUS, help="Only these GPUs: 0,2 or UUIDs. [CUDA_VISIBLE_DEVICES]"
        ),
    ] = None,
    refresh_interval: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_s,
            metavar="TIME",
            rich_help_panel=_GPUS,
            help="How often the GPUs are read. [REFRESH_INTERVAL]",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_GPUS,
            help="The name of this machine; by default its host name. [GPU_POOL_NODE]",
        ),
    ] = None,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_LEASES, help="The folder for the journal of leases. [GPU_POOL_STATE_DIR]"
        ),
    ] = None,
    tokens_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_LEASES,
            help="Who may request GPUs from other machines: lines of name:token. "
            "[GPU_POOL_TOKENS_FILE, also GPU_POOL_TOKENS]",
        ),
    ] = None,
    memory_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            rich_help_panel=_LEASES,
            help="A GPU with this much memory in use is not granted. [GPU_MEMORY_THRESHOLD_PERCENT]",
        ),
    ] = None,
    utilization_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            rich_help_panel=_LEASES,
            help="A GPU with this utilization is not granted. [GPU_UTILIZATION_THRESHOLD_PERCENT]",
        ),
    ] = None,
    workers_per_gpu: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            rich_help_panel=_LEASES,
            help="How many leases without --memory may share a GPU. [GPU_POOL_WORKERS_PER_GPU]",
        ),
    ] = None,
    drain_limit: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_s,
            metavar="TIME",
            rich_help_panel=_LEASES,
            help="How long a GPU is kept back while processes of an ended lease hold memory. [GPU_POOL_DRAIN_LIMIT]",
        ),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            metavar="full|normal",
            rich_help_panel=_LEASES,
            help="full: a grant survives a power failure; normal: a crash of the server. [GPU_POOL_DURABILITY]",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning, error or critical. [LOG_LEVEL]")
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log/--no-access-log", help="Log a line for every call. [ACCESS_LOG]")
    ] = None,
    json: Json = False,
) -> int:
    """Start the server on this machine, and grant leases on its GPUs.

    Without a flag, the environment variable in brackets decides, then the file .env.
    The log goes to standard error. When the server is ready, it prints its addresses on standard output.
    """
    typed = {
        "host": host,
        "port": port,
        "simulated_gpus": simulated_gpus,
        "cuda_visible_devices": visible_devices,
        "gpu_pool_state_dir": state_dir,
        "gpu_pool_tokens_file": tokens_file,
        "gpu_memory_threshold_percent": memory_threshold,
        "gpu_utilization_threshold_percent": utilization_threshold,
        "gpu_pool_workers_per_gpu": workers_per_gpu,
        "gpu_pool_drain_limit": drain_limit,
        "refresh_interval": refresh_interval,
        "gpu_pool_durability": durability,
        "gpu_pool_node": node,
        "log_level": log_level,
        "access_log": access_log,
    }
    return _serve({name: value for name, value in typed.items() if value is not None}, as_json=json)


def _serve(typed: dict[str, Any], *, as_json: bool) -> int:
    try:
        from .flags import settings_of  # noqa: PLC0415 - slow, as all of the server, and may be missing

        settings = settings_of(typed, FLAGS)
        from gpu_worker_pool.server.app import create_app  # noqa: PLC0415
        from gpu_worker_pool.server.logs import configure_logging  # noqa: PLC0415
        from gpu_worker_pool.server.serving import run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpu_worker_pool"):
            raise
        raise Failure(
            f"{error.name} is not installed, and the server needs it; run pip install 'gpu-worker-pool[server]'"
        ) from None
    configure_logging(settings)
    _warn_of_ignored_settings(settings)
    listener = _listen(settings)
    try:
        journal = usable_journal(settings)
        app = create_app(settings)
        try:
            return run(app, listener, lambda: _announce(app, listener, journal, as_json=as_json))
        except SystemExit as ended:
            why = app.why_not_started or "its log says why"
            raise Failure(f"the server cannot start: {why}", FAILED) from ended
    finally:
        listener.close()


def _warn_of_ignored_settings(settings: ServerSettings) -> None:
    if settings.workers > 1:
        logger.warning("WORKERS=%d: one process is the authority over the GPUs; starting one", settings.workers)
    if settings.reload:
        logger.warning("RELOAD is left out here; to work on the server, use python -m gpu_worker_pool.gpu_server")


def _listen(settings: ServerSettings) -> socket.socket:
    from gpu_worker_pool.server.serving import advice, listen  # noqa: PLC0415 - slow

    try:
        return listen(settings)
    except OSError as error:
        what = f"cannot listen on {settings.host}:{settings.port}"
        holder = find_server(settings.host, settings.port, settings.api_prefix)
        if holder is not None:
            why = f"a GPU server runs there already ({holder.node}, {count_gpus(holder.gpu_count)})"
            raise Failure(f"{what}: {why}; use that one, or set --port to another port") from None
        raise Failure(f"{what}: {advice(error, host='--host', port='--port')}") from None


def usable_journal(settings: ServerSettings) -> Path:
    """The path of the journal; Failure where this user cannot write there.

    A server that runs as a service starts all the same and serves statistics. Here a person is present who can fix it.
    """
    from gpu_worker_pool.ledger.journal import JournalError  # noqa: PLC0415 - slow
    from gpu_worker_pool.server.app import journal_path  # noqa: PLC0415

    try:
        path = journal_path(settings).absolute()
    except JournalError as error:
        raise Failure(f"{error} (--state-dir)") from None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(_unusable_state(path.parent, error.strerror or str(error))) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise Failure(_unusable_state(path.parent, "this user may not write there"))
    return path


def _unusable_state(folder: Path, reason: str) -> str:
    return f"the leases cannot be kept in {folder}: {reason}; set --state-dir to a folder of your own"


def _announce(app: PoolApp, listener: socket.socket, journal: Path, *, as_json: bool) -> None:
    announcement = announcement_of(app, *listener.getsockname()[:2], journal=journal)
    try:
        if as_json:
            print_json("serve", announcement.as_json())
            return
        console = out()
        console.print(Text(f"GPU Worker Pool {announcement.version} is ready.", style="bold green"))
        for heading, text in announcement.lines():
            style = "bold red" if heading == "TROUBLE" else "bold"
            show_beside(console, Text(f"  {heading:<12}", style=style), Text(text))
        sys.stdout.flush()
    except (OSError, SystemExit):
        # The reader is gone, for which rich would end the program. The server goes on.
        stop_printing()


def announcement_of(app: PoolApp, host: str, port: int, *, journal: Path) -> Announcement:
    """The announcement of an application that listens at this address."""
    settings, sampler = app.settings, app.statistics.sampler
    prefix, snapshot = settings.api_prefix, sampler.snapshot
    names = names_of_this_machine(with_ipv6=":" in host) if is_every_address(host) else ()
    addresses = urls(host, port, prefix, names=names)
    error = (
        snapshot.error if sampler.has_sampled else "the driver has not answered yet; they are shown as soon as it does"
    )
    tokens = app.tokens
    return Announcement(
        version=gpu_worker_pool.__version__,
        pid=os.getpid(),
        urls=tuple(addresses),
        docs=f"{addresses[0]}{settings.docs_url}" if settings.docs_url else None,
        page=f"{addresses[0]}/ui",
        gpus=GpusShown.of([r.gpu.name for r in snapshot.readings], snapshot.installed, snapshot.source, error),
        state=str(journal),
        trouble=app.pool.trouble,
        writing=Writing(
            "broken" if tokens.is_broken else "none" if tokens.is_unset else "set",
            tuple(sorted(tokens.names)),
            is_open_here=is_every_address(host) or is_this_machine(host),
        ),
        is_default=not any(os.environ.get(name, "").strip() for name in (*PLURAL_VARIABLES, SINGULAR_VARIABLE)),
    )
