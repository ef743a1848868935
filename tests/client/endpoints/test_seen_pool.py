"""What a client makes of an answer of /pool."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.client.endpoints.seen_pool import parse_pool

GPU: dict[str, Any] = {"uuid": "GPU-1", "gpu_id": 0, "state": "leased"}
LEASE: dict[str, Any] = {"id": "a", "state": "active", "gpus": [{"uuid": "GPU-1"}], "worker_id": "w"}


def pool(**parts: Any) -> dict[str, Any]:
    return {"gpus": [GPU], "leases": [], "queue": [], **parts}


@pytest.mark.parametrize("odd", [{**LEASE, "state": "hibernating"}, {"state": "active"}, "nonsense", None])
def test_one_lease_that_cannot_be_read_does_not_make_the_server_unusable(odd: Any) -> None:
    seen = parse_pool(pool(leases=[LEASE, odd], queue=[odd]), 1.0)

    assert [gpu.workers for gpu in seen.gpus] == [{"a": "w"}]


@pytest.mark.parametrize("odd", [{"gpu_id": 1}, {**GPU, "gpu_id": "0"}, {**GPU, "gpu_id": -1}, "nonsense", None])
def test_a_gpu_that_cannot_be_read_does(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"shows no GPUs|is not an index"):
        parse_pool(pool(gpus=[GPU, odd]), 1.0)


@pytest.mark.parametrize("key", ["gpus", "leases", "queue"])
@pytest.mark.parametrize("value", [None, {}, "x", 3])
def test_a_pool_without_its_lists_is_not_one(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match="is this a GPU statistics server"):
        parse_pool(pool(**{key: value}), 1.0)
