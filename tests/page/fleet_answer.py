"""What a leader tells the page of its fleet, made up, so that a fleet of any size costs no server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from playwright.sync_api import BrowserContext, Route

GPUS_OF_BOX = 8
EVERY = 3


class FleetAnswer:
    """`view` is the answer; a test changes it as the fleet changes. Each third GPU is free; the rest is leased one by one."""

    def __init__(self, boxes: int, *, home: str = "gpu-2") -> None:
        self.now = datetime.now(UTC)
        self.names = [f"gpu-{number + 1}" for number in range(boxes)]
        gpus = [self._gpu(name, index) for name in self.names for index in range(GPUS_OF_BOX)]
        leases = [self._lease(gpu) for gpu in gpus if gpu["leases"]]
        pool: dict[str, Any] = {"node": home, "server_id": "made-up", "source": "simulated", "gpus": gpus}
        pool |= {"leases": leases, "queue": [], "queue_length": 0, "thresholds": {}}
        pool["fleet"] = {"id": "f", "leader": self.names[0], "epoch": 7, "role": "leader", "lag_s": 0.4}
        self.view: dict[str, Any] = {
            "pool": pool,
            "now": self.time(0),
            "started_at": self.time(-3600),
            "measured_at": self.now.timestamp(),
            "reading_age_s": 0.1,
            "stale_after_s": 1e9,
            "refresh_interval_s": 1.0,
            "max_history": 100,
            "happened": [],
            "has_tokens": True,
            "title": "made up",
            "docs": None,
            "version": "1.2.3",
            "advice": None,
            "ends": [],
            "boxes": [self._box(name) for name in self.names],
        }

    def serve(self, context: BrowserContext) -> None:
        """Answer for the server: the pool. All else is that of the one box, and its events tell the page when to look."""
        context.route("**/fleet/**", _from_the_box)
        context.route("**/ui/data/pool", lambda route: route.fulfill(json=self.view))

    def time(self, in_s: float) -> str:
        return (self.now + timedelta(seconds=in_s)).isoformat()

    def box(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.view["boxes"][self.names.index(name)]
        return found

    def gpu(self, name: str, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self.view["pool"]["gpus"][self.names.index(name) * GPUS_OF_BOX + index]
        return found

    def lease_on(self, name: str, index: int) -> dict[str, Any]:
        (lease_id,) = self.gpu(name, index)["leases"]
        return next(lease for lease in self.view["pool"]["leases"] if lease["id"] == lease_id)

    def lead(self, name: str) -> None:
        self.view["pool"]["fleet"]["leader"] = name
        for box in self.view["boxes"]:
            box["is_leader"] = box["node"] == name

    def join(self, lease_id: str, gpus: list[tuple[str, int]], **form: Any) -> None:
        """A gang: one lease over all of these GPUs."""
        found = [self.gpu(*gpu) for gpu in gpus]
        for gpu in found:
            gpu |= {"state": "leased", "leases": [lease_id]}
        lease = {"id": lease_id, "state": "active", "granted_at": self.time(-60), "gpus": found, **form}
        self.view["pool"]["leases"].append(lease)

    def _box(self, name: str) -> dict[str, Any]:
        is_leader = name == self.names[0]
        about = {"state": "up", "is_leader": is_leader, "version": "1.2.3", "heard_ago_s": 0.2}
        return {"node": name, "url": f"http://{name}:8000", **about}

    def _gpu(self, name: str, index: int) -> dict[str, Any]:
        is_free = index % EVERY == 2
        gpu = {"node": name, "gpu_id": index, "uuid": f"GPU-{name}-{index}", "name": "Simulated A100"}
        gpu |= {"memory_total_mb": 80000, "memory_used_mb": 500 if is_free else 40000, "utilization_percent": 70}
        return {**gpu, "state": "free" if is_free else "leased", "leases": [] if is_free else [f"l-{name}-{index}"]}

    def _lease(self, gpu: dict[str, Any]) -> dict[str, Any]:
        lease = {"id": gpu["leases"][0], "state": "active", "owner": f"user{gpu['gpu_id']}"}
        return {**lease, "granted_at": self.time(-600), "gpus": [{"node": gpu["node"], "uuid": gpu["uuid"]}]}


def _from_the_box(route: Route) -> None:
    route.continue_(url=route.request.url.replace("/fleet/", "/"))
