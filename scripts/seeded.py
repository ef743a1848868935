"""A real server with simulated GPUs, invented users and a past, for the pictures in the documents."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.testing import START_S, ServerProcess

ROOT = Path(__file__).resolve().parent.parent
NODE = "gpu-box"
GPUS = "5xA100-80GB,3xL4"
TOKENS = "admin:only-for-pictures"
HOURS_OF_PAST = 7.0

ASKERS: list[tuple[str, dict[str, Any]]] = [
    ("ada-llm", {"owner": "ada", "gpus": 2, "model": "A100", "time_limit_s": 9000, "labels": {"command": "train.py"}}),
    ("bob-eval", {"owner": "bob", "model": "A100", "time_limit_s": 5400, "labels": {"command": "eval.py"}}),
    ("carol-serve", {"owner": "carol", "memory_mb": 9000, "model": "L4", "labels": {"command": "serve.py"}}),
    ("dan-notebook", {"owner": "dan", "memory_mb": 6000, "model": "L4", "labels": {"command": "jupyter lab"}}),
    ("erin-sweep-1", {"owner": "erin", "model": "A100", "time_limit_s": 3600, "labels": {"command": "sweep.py"}}),
    ("frank-embed", {"owner": "frank", "model": "A100", "time_limit_s": 2700, "labels": {"command": "embed.py"}}),
    ("erin-sweep-2", {"owner": "erin", "model": "A100", "time_limit_s": 3600, "labels": {"command": "sweep.py"}}),
    ("grace-dpo", {"owner": "grace", "gpus": 2, "model": "A100", "priority": 5, "time_limit_s": 3600}),
    ("heidi-render", {"owner": "heidi", "memory_mb": 24000, "model": "A100", "time_limit_s": 3600}),
    ("erin-sweep-3", {"owner": "erin", "model": "A100", "time_limit_s": 3600, "labels": {"command": "sweep.py"}}),
    ("ivan-probe", {"owner": "ivan", "model": "A100", "time_limit_s": 1200}),
    ("judy-big", {"owner": "judy", "gpus": 4, "model": "A100", "time_limit_s": 7200}),
]
OUT_OF_SERVICE = (7, "bad fan")
OUTSIDER = {"pid": 40712, "name": "python", "user": "mallory", "memory_mb": 9216, "utilization_percent": 34}
OUTSIDERS = {"6": [OUTSIDER]}
BOOKED_IN_S = 3 * 3600.0
PAST_OWNERS = ("ada", "bob", "carol", "erin", "frank", "grace")


@contextmanager
def seeded_server(*, looks_per_s: float = 1.0) -> Iterator[str]:
    """Its URL."""
    settings = {
        "SIMULATED_GPUS": GPUS,
        "REFRESH_INTERVAL": f"{1 / looks_per_s:g}",
        "GPU_POOL_NODE": NODE,
        "GPU_POOL_TOKENS": TOKENS,
    }
    server = ServerProcess(settings)
    outsiders = server.folder / "outsiders.json"
    outsiders.write_text(json.dumps(OUTSIDERS))
    server.env["SIMULATED_OUTSIDERS"] = str(outsiders)
    _write_past(server.state_dir / f"simulated-{NODE}.sqlite3")
    with server:
        yield server.url


def let_them_ask(url: str, step_s: float) -> None:
    """Take a GPU out of service, book one, and let users ask one after the other, so that each GPU's readings show their own history."""
    gpu, reason = OUT_OF_SERVICE
    tell(url, "POST", f"/admin/gpus/{gpu}/drain", {"reason": reason})
    begins = time.time() + BOOKED_IN_S
    booked = {
        "among": ["4"],
        "owner": "heidi",
        "starts_at": str(begins),
        "ends_at": str(begins + 7200),
        "reason": "a course",
    }
    tell(url, "PUT", "/bookings/course", booked)
    for lease_id, form in ASKERS:
        tell(url, "PUT", f"/leases/{lease_id}", {"ttl_s": 600, **form})
        time.sleep(step_s)
    time.sleep(2 * step_s)


def tell(url: str, method: str, path: str, body: dict[str, Any]) -> None:
    """Make one call as admin; an error answer ends everything."""
    token = TOKENS.partition(":")[2]
    headers = {"Authorization": f"Bearer {token}"} if path.startswith(("/admin", "/bookings")) else {}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers, method=method)  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=START_S) as answer:  # noqa: S310
        answer.read()


def _write_past(path: Path) -> None:
    """Write some hours of ended leases, the same each time but for the clock."""
    random, now = Random(7), time.time()  # noqa: S311 - a picture
    keys = [reading.gpu.key for reading in SimulatedProbe(NODE, GPUS).read(0.0).readings]
    leases: list[EndedLease] = []
    for key in keys[:-1]:
        at = now - HOURS_OF_PAST * 3600 + random.uniform(0, 3600)
        while True:
            hold_s = random.choice((600, 1800, 3600, 7200)) * random.uniform(0.5, 1.0)
            if at + hold_s > now - 120:
                break
            leases.append(_ended(key, random.choice(PAST_OWNERS), at, at + hold_s, len(leases)))
            at += hold_s + random.choice((5, 60, 900))
    with closing(SqliteJournal(path)) as journal:
        journal.append((), leases)


def _ended(key: GpuKey, owner: str, granted_at: float, ended_at: float, number: int) -> EndedLease:
    reason = EndReason.HOLDER_DIED if number % 7 == 3 else EndReason.RELEASED
    request = Request(Wishes(1), Holder(owner=owner))
    asked_at = granted_at - 30 * (number % 5)
    return EndedLease(f"past-{number}", request, (key,), number + 1, asked_at, granted_at, ended_at, reason)
