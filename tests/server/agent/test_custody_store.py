"""What a box knows of its fleet after a restart, before it has found a leader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpu_worker_pool.core.fleet.custody_actions import Keep, NoteSeen
from gpu_worker_pool.ledger.sqlite.custody import CustodyFile
from gpu_worker_pool.server.agent.custody_store import LEASE, CustodyStore

from .test_messages import KEPT


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


async def test_what_the_next_version_kept_is_kept(tmp_path: Path) -> None:
    store = await CustodyStore.open(tmp_path / "custody")
    await store.write([Keep(KEPT.id, KEPT), NoteSeen(2, KEPT.fence)])
    await store.close()
    _alter(tmp_path / "custody", "{", '{"colour":"red",')

    store = await CustodyStore.open(tmp_path / "custody")

    assert store.custody("box", "boot", 0.0).leases == {KEPT.id: KEPT}
    await store.close()


async def test_leases_that_cannot_be_read_are_left_to_the_leader(tmp_path: Path) -> None:
    """It takes no lease for ended: the fence was not seen."""
    store = await CustodyStore.open(tmp_path / "custody")
    await store.write([Keep(KEPT.id, KEPT), Keep("b", replace(KEPT, id="b", fence=9)), NoteSeen(2, 9)])
    await store.close()
    _alter(tmp_path / "custody", '"fence":', '"barrier":')

    for _ in range(2):
        store = await CustodyStore.open(tmp_path / "custody")
        custody = store.custody("box", "boot", 0.0)
        assert (custody.leases, custody.epoch_seen, custody.fence_seen) == ({}, 2, 0)
        await store.close()


def _alter(path: Path, old: str, new: str) -> None:
    """Change the text of the first lease, as another version may."""
    file = CustodyFile(path)
    file.write({(LEASE, KEPT.id): file.rows[LEASE, KEPT.id].replace(old, new, 1)})
    file.close()
