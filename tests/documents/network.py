"""The servers that the documents talk to, one set for all blocks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gpu_worker_pool.testing import ServerProcess
from tests.client.statistics_server import StatisticsServer
from tests.documents.names import LOCAL, VARIABLE, hosts_in
from tests.server.leasing import wait_until_free

GPUS = "2xA100-80GB,2xT4"
# As the documents show them. The server on "this machine" has none, so that everybody there may do everything.
TOKENS = {"ada": "a-long-random-secret", "admin": "another-long-secret"}
QUICK = {"SIMULATED_GPUS": GPUS, "REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}


@dataclass(frozen=True)
class Network:
    """`servers` are those with leases: this machine's, and two others."""

    servers: Mapping[str, ServerProcess]
    ports: Mapping[str, int]

    def environment(self, text: str) -> dict[str, str]:
        """What a block finds set: where names lead, and a token where it calls another machine and shows none itself."""
        needs_token = any(host not in LOCAL and not host.startswith("old") for host in hosts_in(text))
        token = {} if not needs_token or TOKENS["ada"] in text else {"GPU_POOL_TOKEN": TOKENS["ada"]}
        return {VARIABLE: json.dumps(dict(self.ports)), **token}

    def held(self) -> list[str]:
        """Leases that hold or wait for something."""
        pools = [server.json("/pool") for server in self.servers.values()]
        return [lease["id"] for pool in pools for lease in [*pool["leases"], *pool["queue"]] if not lease["ended_at"]]

    def clear(self) -> None:
        """As it was at first, for the next block."""
        for place, server in self.servers.items():
            headers = {} if place == "here" else {"Authorization": f"Bearer {TOKENS['admin']}"}
            pool = server.json("/pool")
            for lease in [*reversed(pool["queue"]), *pool["leases"]]:
                server.ask(f"/leases/{lease['id']}", "DELETE", headers)
            for gpu in pool["gpus"]:
                if gpu["is_out_of_service"]:
                    server.ask(f"/admin/gpus/{gpu['uuid']}/undrain", "POST", headers)
            for booking in pool["bookings"]:
                server.ask(f"/bookings/{booking['id']}", "DELETE", headers)
            for quota in server.json("/quotas")["quotas"]:
                server.ask(f"/quotas/{quota['owner']}", "DELETE", headers)
            for name in pool["ignored_processes"]:
                server.ask(f"/admin/ignored-processes/{name}", "DELETE", headers)
            wait_until_free(server)


@contextmanager
def running_network() -> Iterator[Network]:
    tokens = {"GPU_POOL_TOKENS": ",".join(f"{name}:{token}" for name, token in TOKENS.items())}
    servers = {
        "here": ServerProcess(QUICK),
        "odd": ServerProcess(QUICK | tokens),
        "even": ServerProcess(QUICK | tokens),
    }
    try:
        for server in servers.values():
            server.launch()
        for server in servers.values():
            server.wait_until_ready()
        with _old_server() as old_port:
            yield Network(servers, {place: server.port for place, server in servers.items()} | {"old": old_port})
    finally:
        for server in servers.values():
            server.close()


@contextmanager
def _old_server() -> Iterator[int]:
    """A server with statistics only, in a thread."""
    loop = asyncio.new_event_loop()
    server = StatisticsServer(4)

    def run() -> None:
        asyncio.set_event_loop(loop)
        with suppress(asyncio.CancelledError):
            loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server.port
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
