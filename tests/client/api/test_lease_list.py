"""The leases that a client lists and inspects."""

from __future__ import annotations

import socket

import pytest

from gpu_worker_pool import GPUWorkerPool, GPUWorkerPoolClient, NoEndpointAnsweredError
from gpu_worker_pool.testing import ServerProcess
from tests.client.api.two_servers import BOTH, NEVER_S


async def test_leases_of_all_servers_are_listed(big: ServerProcess, small: ServerProcess, names: None) -> None:
    small.ask("/leases/of-another", "PUT", body={"worker_id": "another"})
    async with GPUWorkerPoolClient(service_endpoints=BOTH, polling_interval=NEVER_S) as client:
        own = await client.request_gpu(gpus=2, labels={"run": "7"}, model="A100")
        found = {lease.lease_id: lease for lease in await client.leases()}
        (mine,) = await client.leases(mine=True)

        assert found.keys() == {own.lease_id, "of-another"}
        assert mine == found[str(own.lease_id)] == await client.lease(str(own.lease_id))
        assert (mine.state, mine.endpoint_id, mine.gpu_ids) == ("active", "big.localhost", own.gpu_ids)
        assert (mine.uuids, mine.worker_id, mine.labels["run"]) == (own.uuids, own.worker_id, "7")
        assert mine.granted_at is not None
        other = found["of-another"]
        assert (other.is_mine, other.endpoint_id, other.worker_id) == (False, "small.localhost", "another")


def test_a_lease_is_shown_from_the_queue_to_its_end(small: ServerProcess) -> None:
    with GPUWorkerPool(small.url, polling_interval=NEVER_S) as pool:
        first = pool.request_gpu(gpus=2)
        small.ask("/leases/waiting", "PUT", body={})
        waiting = pool.lease("waiting")
        assert waiting is not None
        assert (waiting.state, waiting.position, waiting.gpu_ids) == ("queued", 1, ())
        assert waiting.reason
        assert waiting in pool.leases()
        pool.release_gpu(first)
        ended = pool.lease(str(first.lease_id))
        assert ended is not None
        assert (ended.state, ended.reason, ended.is_mine) == ("ended", "released", True)
        assert ended.ended_at is not None
        assert [lease.lease_id for lease in pool.leases()] == ["waiting"]
        assert pool.lease("no-such-lease") is None
        with pytest.raises(ValueError, match="is not a lease id"):
            pool.lease("no such/lease?")


async def test_servers_that_do_not_answer_are_left_out_unless_none_does(small: ServerProcess) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with GPUWorkerPoolClient(service_endpoints=[dead, small.url]) as client:
        held = await client.request_gpu()
        assert [lease.lease_id for lease in await client.leases()] == [held.lease_id]
    client = GPUWorkerPoolClient(dead)
    async with client:
        with pytest.raises(NoEndpointAnsweredError, match="cannot connect"):
            await client.leases()
    with pytest.raises(RuntimeError, match="not started"):
        await client.leases()
