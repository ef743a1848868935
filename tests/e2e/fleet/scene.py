"""A fleet at work: candidates and agents with a network before each, a primary and a standby, old and new clients."""

from __future__ import annotations

import json
import re
import secrets
import signal
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from gpu_worker_pool.core.model.events import TakenOver
from gpu_worker_pool.ledger.codec import decode_event
from gpu_worker_pool.testing import COMMAND, inherited_environment
from tests.e2e.faults.workers import PYTHON, WORKER
from tests.e2e.run_history import read_history
from tests.e2e.worker import NoAnswer, Orders, call, now
from tests.ledger.postgres.server import PostgresServer
from tests.preloaded import NO_CERTIFICATES, PreloadedPopen

from .client_worker import ClientOrders
from .fleet import KEY, LIMIT_S, Box, until
from .journal_check import FleetHistory, JournalRow, outstanding
from .silent_proxy import SilentProxy

JOINED = re.compile(r"has taken this box \(epoch (\d+)\)")
# What a leader tells a second box of one name.
REFUSED = "another machine has the node name"
# A box that is broken must not hold up what is done to the others.
PATIENCE_S = 0.3
# One statement, so that the head belongs to the events.
ROWS = """SELECT leader.head || ' ' || event.position || ' ' || event.epoch || ' ' || event.body
FROM gpu_pool.leader JOIN gpu_pool.event USING (pool) ORDER BY event.position"""
RECORDED = "SELECT coalesce(json_agg(json_build_array(lease_id, (body::json ->> 'fence')::bigint)), '[]') FROM gpu_pool.ended_lease"


@cache
def reboot_prefix() -> tuple[str, ...] | None:
    """What starts a program in a mount namespace, so that it sees another boot id; None if this user cannot."""
    for flags in ("-m", "-Urm"):
        probe = ("unshare", flags, "sh", "-c", "mount --bind /dev/null /proc/sys/kernel/random/boot_id")
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(probe, check=True, capture_output=True, timeout=LIMIT_S)
            return ("unshare", flags)
    return None


class SceneBox(Box):
    """A box that the others, and its database if it is a candidate, reach over networks of its own."""

    def __init__(self, fleet: str, folder: Path, databases: Sequence[SilentProxy] = (), **settings: str) -> None:
        super().__init__(fleet, folder, GPU_POOL_FLEET_KEY=KEY, **settings)
        self.databases = databases
        self.network = SilentProxy(self.url)
        self.address = f"http://127.0.0.1:{self.network.port}"
        self.env["GPU_POOL_FLEET_ADDRESS"] = self.address
        self.is_candidate = bool(databases) or fleet == "lead"

    def role(self) -> str | None:
        """What it says of itself; None if it says nothing at once."""
        try:
            _, health = call(self.port, "GET", "/health", None, PATIENCE_S)
        except NoAnswer:
            return None
        return str(health["fleet"]["role"]) if health.get("fleet") else None

    def reboot(self) -> None:
        """Kill it, and start it as after a reboot: the machine has another boot id."""
        self.kill()
        prefix = reboot_prefix()
        assert prefix is not None
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{secrets.token_hex(16)}\n")
        mount = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
        self.command = [*prefix, "sh", "-c", mount, "sh", *COMMAND]
        self.launch()

    def close(self) -> None:
        super().close()
        for proxy in (self.network, *self.databases):
            proxy.close()


Role: TypeAlias = "tuple[Orders | ClientOrders, SceneBox | None]"


class Scene:
    """`candidates` and `agents` are how many of each. With a standby, that can be promoted once. Without a database, one box
    leads with its own journal.
    """

    def __init__(
        self,
        primary: PostgresServer | None,
        name: str,
        folder: Path,
        *,
        candidates: int = 2,
        agents: int = 1,
        standby: PostgresServer | None = None,
        **settings: str,
    ) -> None:
        self._database = primary
        self.standby = standby
        self.name = name
        self.folder = folder
        self.boxes: list[SceneBox] = []
        self.twins: list[Box] = []
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.roles: dict[str, Orders | ClientOrders] = {}
        self._numbers = count()
        servers = [server for server in (primary, standby) if server is not None]
        if primary is None:
            self.boxes.append(SceneBox("lead", folder / "c0", (), **settings))
        for number in range(0 if primary is None else candidates):
            proxies = [SilentProxy(server.url(name)) for server in servers]
            hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
            self.boxes.append(
                SceneBox(f"postgresql://admin@{hosts}/{name}", folder / f"c{number}", proxies, **settings)
            )
        listed = ",".join(box.address for box in self.boxes)
        for number in range(agents):
            self.boxes.append(SceneBox(listed, folder / f"a{number}", (), **settings))

    @property
    def has_database(self) -> bool:
        return self._database is not None

    @property
    def database(self) -> PostgresServer:
        assert self._database is not None, "this fleet has none"
        return self._database

    @database.setter
    def database(self, promoted: PostgresServer) -> None:
        self._database = promoted

    # --- boxes -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for box in self.boxes:
            box.launch()
        for box in self.boxes:
            box.wait_until_ready()
        self.await_boxes()

    def keep_up(self, *, but: Sequence[SceneBox] = ()) -> None:
        """Start again what has ended by itself: a candidate does not start without its database."""
        for box in self.boxes:
            if box not in but and not box.is_running:
                box.launch()

    def leader(self, *, but: Sequence[SceneBox] = ()) -> SceneBox | None:
        """The box that says that it leads, if there is one among those that are not broken."""
        asked = (box for box in self.boxes if box.is_candidate and box not in but and box.is_running)
        return next((box for box in asked if box.role() == "leader"), None)

    def await_leader(self, *, but: Sequence[SceneBox] = ()) -> SceneBox:
        found: SceneBox = until(lambda: self.leader(but=but), "a box leads")
        return found

    def await_boxes(self) -> SceneBox:
        """The leader, once all GPUs of all boxes are known to it."""

        def has_joined() -> SceneBox | None:
            self.keep_up()
            leader = self.leader()
            pool = leader and self.pool(leader)
            known = {gpu["node"] for gpu in pool["gpus"] if gpu["state"] != "unknown"} if pool else set()
            return leader if len(known) == len(self.boxes) else None

        found: SceneBox = until(has_joined, "all boxes have joined the leader")
        return found

    def pool(self, leader: SceneBox) -> dict[str, Any] | None:
        try:
            status, pool = call(leader.port, "GET", "/fleet/pool", None, 2.0)
        except NoAnswer:
            return None
        return pool if status == 200 else None

    def add_twin(self, box: SceneBox) -> Box:
        """Another machine that has the same node name."""
        folder = self.folder / f"twin{len(self.twins)}"
        listed = ",".join(each.address for each in self.boxes if each.is_candidate)
        twin = Box(listed, folder, GPU_POOL_NODE=box.node)
        twin.launch()
        self.twins.append(twin)
        return twin

    # --- workers -----------------------------------------------------------------------------------------------------

    def begin(self, folder: Path) -> None:
        """Another part of the story, with workers and lines of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.roles.clear()

    def employ(self, *roles: Role) -> None:
        """Start a worker for each. One with a box asks only that box, as clients of a single box do."""
        for role, box in roles:
            ports = [box.port] if box is not None else [each.port for each in self.boxes]
            self._start_worker(
                replace(role, endpoints=tuple(f"http://127.0.0.1:{port}" for port in ports))
                if isinstance(role, ClientOrders)
                else replace(
                    role, port=ports[0], other_ports=tuple(ports[1:]), prefix="/fleet" if box is None else role.prefix
                )
            )

    def _start_worker(self, role: Orders | ClientOrders) -> None:
        name = f"{'new' if isinstance(role, ClientOrders) else 'old'}{next(self._numbers)}"
        folder = str(self.folder)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if isinstance(role, ClientOrders):
            role = replace(role, name=name, folder=folder)
            root = inherited_environment({"PATH": "/usr/bin:/bin"})["PYTHONPATH"]
            env = {**NO_CERTIFICATES, "PYTHONPATH": root, "GPU_POOL_TTL": str(role.ttl_s)}
            with (self.folder / "clients.log").open("ab") as log:
                self.workers[name] = PreloadedPopen(role.command, env=env, stderr=log, **streams)
        else:
            role = replace(role, name=name, folder=folder)
            self.workers[name] = subprocess.Popen((*PYTHON, str(WORKER), role.encoded()), env={}, **streams)
        self.roles[name] = role

    def kill_worker(self, name: str) -> None:
        """Kill it, and start another one in its place."""
        role, worker = self.roles.pop(name), self.workers.pop(name)
        killed_at = now()
        worker.kill()
        worker.wait()
        self.say("killed", at=killed_at, worker=name, reaped_at=now())
        self._start_worker(role)

    def workers_of(self, box: SceneBox) -> list[str]:
        """Those that may count as processes of this box: its own, and all local ones that ask any box."""

        def may_be(role: Orders | ClientOrders) -> bool:
            return isinstance(role, ClientOrders) or role.port == box.port or (role.is_local and bool(role.prefix))

        return [name for name, role in self.roles.items() if may_be(role)]

    def end_workers(self) -> None:
        for worker in self.workers.values():
            worker.terminate()
        self.await_workers()

    def await_workers(self) -> None:
        """Until all have ended. None is left for the next part of the story, also if one of them does not end."""
        workers, self.workers = self.workers, {}
        try:
            ended = {name: worker.wait(LIMIT_S) for name, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
        assert not any(ended.values()), f"workers ended with {ended}"

    def say(self, what: str, at: float | None = None, **facts: object) -> None:
        line = {"what": what, "who": "nemesis", "at": now() if at is None else at, **facts}
        with (self.folder / "nemesis.history").open("a", encoding="utf-8") as history:
            history.write(json.dumps(line) + "\n")

    # --- the end -----------------------------------------------------------------------------------------------------

    def say_final(self) -> None:
        """Write down what is left, once nothing should be."""
        left: tuple[list[str], list[str]] | None = None
        gives_up_at = now() + 10.0
        while now() < gives_up_at:
            leader = self.leader()
            if leader is not None and (pool := self.pool(leader)) is not None:
                leases = [f"{lease['id']} is still {lease['state']}" for lease in pool["leases"] + pool["queue"]]
                left = leases, [f"{gpu['node']} {gpu['state']}" for gpu in pool["gpus"] if gpu["state"] != "free"]
                if left == ([], []):
                    break
            time.sleep(0.05)
        leases, gpus = left or ([], [])
        self.say("final", leases=leases, gpus=gpus, is_read=left is not None)

    def await_served(self, limit_s: float) -> None:
        """Let the workers work until each request that waits now has come to an end, and write down how long that took."""
        since = now()
        while now() < since + limit_s:
            history = read_history(self.folder)
            waited = {lease.key for lease in outstanding(history, since)}
            if not waited & {lease.key for lease in outstanding(history, now())}:
                break
            time.sleep(0.5)
        self.say("patience", since=since)

    def history(self) -> FleetHistory:
        """All that happened, from the workers' lines, the journal and the logs of the boxes."""
        head, rows, recorded = self._journal() if self.has_database else self._own_journal()
        return FleetHistory(
            read_history(self.folder),
            rows,
            head,
            {box.node: joined(box) for box in self.boxes},
            # One that was ended before it asked a leader shows nothing.
            {twin.folder.name: joined(twin) for twin in self.twins if joined(twin) or REFUSED in twin.log()},
            {(lease, fence) for lease, fence in recorded},
        )

    def _journal(self) -> tuple[int, list[JournalRow], list[tuple[str, int]]]:
        parts = [line.split(" ", 3) for line in self.database.execute(ROWS, self.name).splitlines()]
        rows = [JournalRow(int(position), int(epoch), decode_event(body)) for _, position, epoch, body in parts]
        return int(parts[0][0]), rows, json.loads(self.database.execute(RECORDED, self.name))

    def _own_journal(self) -> tuple[int, list[JournalRow], list[tuple[str, int]]]:
        """That of the leader, in its file. Its events have the epoch of the take-over before them."""
        (path,) = self.boxes[0].state_dir.glob("simulated-*.sqlite3")
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as journal:
            found = journal.execute("SELECT position, body FROM event ORDER BY position").fetchall()
            recorded = journal.execute("SELECT lease_id, fence FROM ended_lease").fetchall()
        rows: list[JournalRow] = []
        for position, body in found:
            event = decode_event(body)
            epoch = event.epoch if isinstance(event, TakenOver) else rows[-1].epoch if rows else 0
            rows.append(JournalRow(position, epoch, event))
        return rows[-1].position, rows, recorded

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        for box in (*self.boxes, *self.twins):
            if box.is_running:
                box.send(signal.SIGCONT)
            box.close()


def joined(box: Box) -> list[int]:
    return [int(epoch) for epoch in JOINED.findall(box.log())]


def roles_of(scene: Scene, *, ttl_s: float, old: int = 2, new: int = 1, fleet: int = 2, seed: int = 0) -> list[Role]:
    """Old clients of each box, one of them as from another machine, and clients of the whole fleet. Some hold a GPU for
    longer than a TTL.
    """
    base = Orders("", 0, "", shortest_hold_s=0.05, longest_hold_s=0.4, longest_wait_s=1.0, ttl_s=ttl_s)
    of_client = ClientOrders("", (), "", ttl_s=ttl_s, shortest_hold_s=0.05, longest_hold_s=0.4)
    long_s = 3 * ttl_s
    found: list[Role] = []
    for box in scene.boxes:
        found += [(replace(base, is_local=number % 2 == 0), box) for number in range(old)]
        found += [(of_client, None)] * new
        found += [(replace(base, is_local=False, longest_hold_s=long_s), box)]
    found += [(replace(base, is_local=number % 2 == 0, gpus=1 + number % 2), None) for number in range(fleet)]
    found += [(replace(base, is_local=False, longest_hold_s=long_s), None)]
    found += [(replace(of_client, longest_hold_s=long_s), None)]
    return [(replace(role, seed=seed + number), box) for number, (role, box) in enumerate(found)]
