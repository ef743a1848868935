"""`gpu-pool serve`: its flags, each of which is a setting of the server."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import gpu_worker_pool
from gpu_worker_pool.cli.declare import Option, parameters
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import OutputClosed, Text, out, print_json, stop_printing
from gpu_worker_pool.cli.table import show_beside
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.config import PLURAL_VARIABLES, SINGULAR_VARIABLE
from gpu_worker_pool.failure import FAILED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_every_address, is_this_machine, names_of_this_machine, urls

from .announcement import Announcement, GpusShown, Writing
from .port_holder import find_server

if TYPE_CHECKING:
    import socket

    from gpu_worker_pool.server.app import PoolApp
    from gpu_worker_pool.server.settings import ServerSettings

logger = logging.getLogger(__name__)


def _option(flag: str, metavar: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    return Option(flag, metavar=metavar, help=text, parser=parser)


def without_password(url: str) -> str:
    from gpu_worker_pool.server.fleet import has_password  # noqa: PLC0415 - slow

    if not url.strip():
        raise ValueError(
            "it is empty; write the URL of the database, postgresql://host/name, or those of boxes of the fleet"
        )
    if has_password(url):
        raise ValueError(
            "the URL has a password, and every user of this machine can read the command line of a program; set "
            "GPU_POOL_FLEET to the URL, or leave the password out and keep it in ~/.pgpass"
        )
    return url


# A parameter has the name of its setting.
def serve(
    host: Annotated[
        str | None, _option("--host", "ADDRESS", "The address to listen on; by default 0.0.0.0, all addresses. [HOST]")
    ] = None,
    port: Annotated[
        int | None, Option("--port", "-p", metavar="NUMBER", help="By default 8000; 0 takes a free port. [PORT]")
    ] = None,
    simulated_gpus: Annotated[
        str | None, _option("--simulated-gpus", "SPEC", "Simulate GPUs: 4, or 4xA100-80GB,4xT4. [SIMULATED_GPUS]")
    ] = None,
    gpu_pool_state_dir: Annotated[
        str | None, _option("--state-dir", "DIR", "The folder for the journal of leases. [GPU_POOL_STATE_DIR]")
    ] = None,
    gpu_pool_fleet: Annotated[
        str | None,
        _option(
            "--fleet",
            "URL",
            "A fleet with a database, where another box takes over: postgresql://host/name on a box that can lead, "
            "http://gpu-01:8000,... (boxes of the fleet) on one that cannot. [GPU_POOL_FLEET]",
            without_password,
        ),
    ] = None,
    lead: Annotated[
        bool,
        Option(
            "--lead",
            help="Lead a fleet: one queue over several boxes, with the journal of this one. It prints the line that the other "
            "boxes start with. [GPU_POOL_FLEET=lead]",
        ),
    ] = False,
    join: Annotated[
        str | None,
        _option("--join", "URL", "Share the queue of the box that leads, as http://gpu-01:8000. [GPU_POOL_FLEET]"),
    ] = None,
    log_level: Annotated[
        str | None, _option("--log-level", "LEVEL", "debug, info, warning, error or critical. [LOG_LEVEL]")
    ] = None,
    env_file: Annotated[
        Path | None, _option("--env-file", "FILE", "Read settings from this file instead of .env in this folder.")
    ] = None,
    json: Json = False,
) -> int:
    """Start the server on this machine, and grant leases on its GPUs.

    Each flag stands for the environment variable in brackets. .env.example describes all settings; set them in the environment
    or in a file .env. The log goes to standard error. In a terminal it shows only warnings, unless --log-level is given.
    """
    typed = {name: value for name, value in locals().items() if name in FLAGS and value is not None}
    chosen = _chosen_fleet(lead=lead, join=join, fleet=gpu_pool_fleet)
    if chosen is not None:
        typed["gpu_pool_fleet"] = chosen
    return _serve(typed, env_file, as_json=json)


# The settings that have a flag, with the flag.
FLAGS: dict[str, str] = {
    each.name: each.flags[0] for each in parameters(serve) if each.name not in {"env_file", "json", "lead", "join"}
}


def _chosen_fleet(*, lead: bool, join: str | None, fleet: str | None) -> str | None:
    """What these flags say of the fleet, as the setting has it."""
    if lead + (join is not None) + (fleet is not None) > 1:
        raise Failure("--lead, --join and --fleet are three ways into a fleet; give one of them", USAGE)
    if join is not None and not join.startswith(("http://", "https://")):
        raise Failure(f"--join is {join!r}; it must be the URL of the box that leads, as http://gpu-01:8000", USAGE)
    return "lead" if lead else join or fleet


def _serve(typed: dict[str, Any], env_file: Path | None, *, as_json: bool) -> int:
    try:
        settings = settings_of(typed, FLAGS, env_file)
        from gpu_worker_pool.server.app import create_app  # noqa: PLC0415
        from gpu_worker_pool.server.logs import configure_logging  # noqa: PLC0415
        from gpu_worker_pool.server.serving import run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpu_worker_pool"):
            raise
        raise Failure(
            f"the server needs {error.name}, which is not installed; run pip install 'gpu-worker-pool[server]'"
        ) from None
    if sys.stderr.isatty() and not settings.model_fields_set & {"log_level", "access_log"}:
        # A person sees the banner, and what is wrong. The banner says what may be asked from where.
        settings = settings.model_copy(update={"log_level": "WARNING", "access_log": False})
        logging.getLogger("gpu_worker_pool.server.serving").addFilter(lambda record: not hasattr(record, "in_banner"))
    configure_logging(settings)
    _warn_of_ignored_settings(settings)
    listener = _listen(settings)
    try:
        kept_in = _where_kept(settings)
        app = create_app(settings)
        try:
            return run(app, listener, lambda: _announce(app, listener, kept_in, as_json=as_json))
        except SystemExit as ended:
            why = app.why_not_started or "its log says why"
            raise Failure(f"the server cannot start: {why}", FAILED) from ended
    finally:
        listener.close()


def settings_of(typed: Mapping[str, Any], flags: Mapping[str, str], env_file: Path | None = None) -> ServerSettings:
    """The settings of the server. `typed` has the values of flags, by setting; `flags` has the flag of each setting. A named
    file takes the place of `.env`.

    Failure for an invalid flag, and for a file that cannot be read: there may be tokens in it. An invalid value in the
    environment is logged, and the default is used.
    """
    from gpu_worker_pool.server.settings import ServerSettings  # noqa: PLC0415 - slow, as all of the server, and may be missing

    for name, value in typed.items():
        try:
            ServerSettings.read(name, value)
        except ValueError as why:
            raise Failure(f"{flags.get(name, name)} is {value!r}: {why}", USAGE) from None
    try:
        return ServerSettings(**typed, **({} if env_file is None else _named_file(env_file)))
    except (UnicodeDecodeError, OSError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror or str(error)
        which = ".env in this folder" if env_file is None else f"--env-file {env_file}"
        raise Failure(f"{which} cannot be read: {reason}; fix it, or move it away", USAGE) from None


def _named_file(path: Path) -> dict[str, Any]:
    path.open("rb").close()  # a file that is not there is not skipped, as .env is
    return {"_env_file": path.absolute()}


def _warn_of_ignored_settings(settings: ServerSettings) -> None:
    if settings.workers > 1:
        logger.warning("WORKERS=%d: one process is the authority over the GPUs; starting one", settings.workers)
    if settings.reload:
        logger.warning("RELOAD has no effect here; to work on the server, use python -m gpu_worker_pool.gpu_server")


def _listen(settings: ServerSettings) -> socket.socket:
    from gpu_worker_pool.server.serving import advice, listen  # noqa: PLC0415 - slow

    try:
        return listen(settings)
    except OSError as error:
        what = f"cannot listen on {settings.host}:{settings.port}"
        holder = find_server(settings.host, settings.port, settings.api_prefix)
        if holder is not None:
            why = f"a GPU server runs there already ({holder.node}, {count(holder.gpu_count, 'GPU')})"
            raise Failure(f"{what}: {why}; use that one: gpu-pool run --endpoint {holder.url} -- CMD") from None
        raise Failure(f"{what}: {advice(error, host='--host', port='--port')}") from None


def _where_kept(settings: ServerSettings) -> str:
    """Where the leases are kept, without a password; Failure where they cannot be."""
    from gpu_worker_pool.server.fleet import FleetUnusable, fleet_database, keep_key  # noqa: PLC0415 - slow

    try:
        keep_key(settings)
        database = fleet_database(settings)
    except FleetUnusable as error:
        raise Failure(str(error)) from None
    return str(usable_journal(settings) if database is None else database)


def usable_journal(settings: ServerSettings) -> Path:
    """The path of the journal; Failure where this user cannot write there.

    A server that runs as a service starts all the same and serves statistics. Here a person is present who can fix it.
    """
    from gpu_worker_pool.host.state_dir import StateDirError, make_state_dir  # noqa: PLC0415 - slow
    from gpu_worker_pool.server.state_files import journal_path  # noqa: PLC0415

    try:
        path = journal_path(settings).absolute()
        try:
            make_state_dir(path.parent)
            reason = None if os.access(path.parent, os.W_OK | os.X_OK) else "this user may not write there"
        except OSError as error:
            reason = error.strerror or str(error)
    except StateDirError as error:
        raise Failure(f"{error} (--state-dir)") from None
    if reason is not None:
        raise Failure(f"the leases cannot be kept in {path.parent}: {reason}; set --state-dir to a folder of your own")
    return path


def _announce(app: PoolApp, listener: socket.socket, kept_in: str, *, as_json: bool) -> None:
    announcement = announcement_of(app, *listener.getsockname()[:2], kept_in=kept_in)
    try:
        if as_json:
            print_json("serve", announcement.as_json())
            return
        console = out()
        console.print(Text(f"GPU Worker Pool {announcement.version} is ready.", style="bold green"))
        for heading, text in announcement.lines():
            style = "bold red" if heading == "TROUBLE" else "bold"
            show_beside(console, Text(f"  {heading:<12}", style=style), text)
        sys.stdout.flush()
    except OutputClosed:
        # The reader is gone. The server goes on.
        stop_printing()


def _join_line(settings: ServerSettings, port: int) -> str | None:
    """What to paste on the other boxes, if this one leads with its own journal. The key is for people, not for logs."""
    from gpu_worker_pool.server.fleet import join_line, kept_key, leads_alone, own_address  # noqa: PLC0415 - slow  # noqa: PLC0415

    if not leads_alone(settings):
        return None
    address, key = own_address(settings, port), kept_key(settings)
    if not key or not sys.stdout.isatty():
        return f"gpu-pool serve --join {address} (with the key that `gpu-pool fleet key` shows here)"
    return join_line(key, address)


def announcement_of(app: PoolApp, host: str, port: int, *, kept_in: str) -> Announcement:
    settings, tokens = app.settings, app.tokens
    sampler, snapshot = app.statistics.sampler, app.statistics.sampler.snapshot
    names = names_of_this_machine(with_ipv6=":" in host) if is_every_address(host) else ()
    addresses = urls(host, port, settings.api_prefix, names=names)
    unread = None if sampler.has_sampled else "the driver has not answered yet; they are shown as soon as it does"
    taken = [reading.other_server for reading in snapshot.readings if reading.other_server]
    others = "; ".join(dict.fromkeys(taken)) or None
    # Without a GPU of its own it can grant nothing; with some, it is a remark.
    trouble, remark = (others, None) if len(taken) == len(snapshot.readings) else (None, others)
    return Announcement(
        version=gpu_worker_pool.__version__,
        pid=os.getpid(),
        urls=tuple(addresses),
        docs=f"{addresses[0]}{settings.docs_url}" if settings.docs_url else None,
        page=f"{addresses[0]}/ui",
        gpus=GpusShown.of(
            [r.gpu.name for r in snapshot.readings],
            snapshot.installed,
            snapshot.source,
            unread or snapshot.error or remark,
        ),
        state=kept_in,
        trouble=app.pool.why_no_grants or trouble,
        writing=Writing(
            "broken" if tokens.is_broken else "none" if tokens.is_unset else "set",
            tuple(sorted(tokens.names)),
            is_open_here=is_every_address(host) or is_this_machine(host) or app.access.socket is not None,
            only_on=host if is_this_machine(host) else None,
            local_url=urls("localhost", port, settings.api_prefix, names=())[0],
        ),
        socket=app.access.socket,
        fleet=app.pool.fleet(),
        join=_join_line(settings, port),
        is_default=not any(os.environ.get(name, "").strip() for name in (*PLURAL_VARIABLES, SINGULAR_VARIABLE)),
    )
