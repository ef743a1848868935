"""`gpu-pool enforce`: only the holders of a GPU may open its device."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.pools.servers import one_server
from gpu_worker_pool.enforce.enforcer import Enforcer, stop, uids_of
from gpu_worker_pool.enforce.plan import Mode
from gpu_worker_pool.enforce.server import PoolServer
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.unix_socket import VARIABLE, find_socket

MODE_VARIABLE: Final = "GPU_POOL_ENFORCE"
_MODES: Final = "|".join(Mode)


def enforce(
    mode: Annotated[
        Mode | None, Argument(metavar=f"[{_MODES}]", help=f"How far it goes. [observe, or {MODE_VARIABLE}]")
    ] = None,
    allow: Annotated[
        str | None,
        Option(
            "--allow", metavar="USERS", help="Users who may open every GPU, such as that of a monitor: dcgm,zabbix."
        ),
    ] = None,
    endpoint: Endpoints = None,
    *,
    stops: Annotated[
        bool, Option("--stop", help="End the one that runs, and let all users open the GPUs as before.")
    ] = False,
    root: Annotated[Path, Option("--root", hidden=True)] = Path("/"),
) -> None:
    """Let only the holders of a GPU open its device. Run it as root on each GPU box, beside the server.

    observe logs what would be refused; warn also tells those who use a GPU without a lease; deny refuses. While the server is
    away, and when this ends, the devices stay as they are; --stop opens them to all again.
    """
    if os.geteuid() != 0:
        raise Failure("only root may restrict who opens a device; use sudo", REFUSED)
    if stops:
        restored = stop()
        complain(f"all users may open the GPUs again as before ({', '.join(restored) or 'no device had been changed'})")
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    names = [name.strip() for name in (allow or "").split(",") if name.strip()]
    enforcer = Enforcer(_server(endpoint), mode or _mode_of_environment(), allowed=uids_of(names), root=root)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: enforcer.end())
    enforcer.run()
    complain("ended; the devices stay as they are, `gpu-pool enforce --stop` gives them back")


def _mode_of_environment() -> Mode:
    text = os.environ.get(MODE_VARIABLE) or Mode.OBSERVE
    try:
        return Mode(text)
    except ValueError:
        raise Failure(f"{MODE_VARIABLE} is {text!r}; it must be {_MODES}", USAGE) from None


def _server(endpoint: list[str] | None) -> PoolServer:
    (url,) = one_server(endpoint).config.endpoints.values()
    if not is_this_machine(url.host):
        raise Failure(f"{url.url} is not on this machine, and only its own server hands out its GPUs", USAGE)
    path = find_socket(os.environ, port=url.port)
    if path is None:
        raise Failure(
            f"the server at {url.url} has no Unix socket that can be trusted: start it first, or name its socket by {VARIABLE}"
        )
    return PoolServer(path, url.path)
