"""What a box knows of its fleet after a restart, before it has found a leader."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.core.fleet.custody_actions import NoteSeen
from gpu_worker_pool.server.agent.custody_store import CustodyStore


async def test_it_knows_the_fleet_that_it_belonged_to_and_who_it_is(tmp_path: Path) -> None:
    store = await CustodyStore.open(tmp_path / "custody")
    assert store.pool_id is None
    await store.write([NoteSeen(3, 7)], "a-fleet")
    machine_id = store.machine_id
    await store.close()

    store = await CustodyStore.open(tmp_path / "custody")

    custody = store.custody("a", "boot", 0.0)
    assert (store.pool_id, store.machine_id) == ("a-fleet", machine_id)
    assert (custody.epoch_seen, custody.fence_seen) == (3, 7)
    await store.write([], "another-fleet")
    assert store.pool_id == "another-fleet"
    await store.close()
