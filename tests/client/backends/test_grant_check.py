"""Which grants are believed, and what of them reaches an environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool import GPUWorkerPoolClient, RequestRefusedError
from gpu_worker_pool.client.backends.grant_check import NotReadYet, UnbelievableGrant, check_grant
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.wire.leases import GangLeaseView
from gpu_worker_pool.wire.reader import read
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, Seen, lease

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
GPUS = [{"node": "box", "gpu_id": index, "uuid": f"GPU-{index}abc", "name": "A100"} for index in range(3)]
MIG = {"node": "box", "gpu_id": 101, "uuid": "MIG-77", "name": "A100 MIG"}


def checked(
    env: Mapping[str, Any], gpus: list[Any] = GPUS[:1], wishes: Wishes | None = None, **more: object
) -> dict[str, str]:
    data = {"id": "x", "state": "active", "gpus": gpus, "env": env, **more}
    found = read(GangLeaseView, data)
    assert found is not None
    return check_grant(found, data, Request(wishes or Wishes(gpus=len(gpus))))[1]


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [
        (GPUS[:1], "0"),
        (GPUS[:1], "GPU-0abc"),
        (GPUS[:2], "1,0"),
        (GPUS[:2], "GPU-1ABC,GPU-0abc"),
        ([MIG], "MIG-77"),
        ([GPUS[0], MIG], "GPU-0abc,MIG-77"),
    ],
)
def test_the_gpus_of_the_grant_are_shown_and_nothing_else_is_set(gpus: list[Any], visible: str) -> None:
    sent = {**ORDER, "CUDA_VISIBLE_DEVICES": visible, "BASH_ENV": "x.sh", "PYTHONPATH": "x", "LD_PRELOAD": "x.so"}
    assert checked(sent, gpus) == {**ORDER, "CUDA_VISIBLE_DEVICES": visible}
    del sent["CUDA_DEVICE_ORDER"]
    assert checked(sent, gpus) == {**ORDER, "CUDA_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize("fence", ["7", "seven", 0, -1, 1.5, [7], {}, True])
def test_a_grant_whose_fence_is_not_a_number_from_one_on_is_not_believed(fence: object) -> None:
    visible = {**ORDER, "CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(UnbelievableGrant, match="fence"):
        checked(visible, fence=fence)
    assert checked(visible, fence=7) == checked(visible, fence=None) == checked(visible)


@pytest.mark.parametrize("visible", [None, "", "1", "0,1", "0,0", "-1", "0\0", "0\n", "0 ", "GPU-", "GPU-0", "all", 0])
def test_a_grant_whose_variable_does_not_name_its_gpus_is_not_believed(visible: object) -> None:
    with pytest.raises(UnbelievableGrant, match="CUDA_VISIBLE_DEVICES"):
        checked({**ORDER, "CUDA_VISIBLE_DEVICES": visible})
    with pytest.raises(UnbelievableGrant, match="PCI_BUS_ID"):
        checked({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("gpus", "wishes", "why"),
    [
        (GPUS[:1], Wishes(gpus=2), "2 were asked for"),
        (GPUS[:2], Wishes(gpus=1), "1 were asked for"),
        ([GPUS[0], GPUS[0]], Wishes(gpus=2), "twice"),
        (GPUS[:1], Wishes(among=("1", "GPU-2")), "not among"),
        ([GPUS[0], "GPU-1"], Wishes(gpus=2), "cannot be read"),
        ([{**GPUS[0], "gpu_id": "0"}], Wishes(), "cannot be read"),
        ([{**GPUS[0], "gpu_id": -1}], Wishes(), "cannot be read"),
        ([{**GPUS[0], "uuid": "GPU-\x1b[2J"}], Wishes(), "cannot be read"),
        ([{**GPUS[0], "uuid": ""}], Wishes(), "cannot be read"),
    ],
)
def test_a_grant_of_other_gpus_than_were_asked_for_is_not_believed(gpus: list[Any], wishes: Wishes, why: str) -> None:
    with pytest.raises(UnbelievableGrant, match=why):
        checked({**ORDER, "CUDA_VISIBLE_DEVICES": "0"}, gpus, wishes)


def test_gpus_that_were_not_read_yet_after_a_restart_are_asked_for_again() -> None:
    with pytest.raises(NotReadYet):
        checked({**ORDER, "CUDA_VISIBLE_DEVICES": "GPU-0abc"}, [{**GPUS[0], "gpu_id": None}])


@given(st.dictionaries(st.sampled_from(["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PATH"]) | st.text(), st.text()))
def test_whatever_is_sent_only_the_two_variables_come_out(env: dict[str, str]) -> None:
    try:
        found = checked(env)
    except UnbelievableGrant:
        return
    assert found in (
        {**ORDER, "CUDA_VISIBLE_DEVICES": "0"},
        {**ORDER, "CUDA_VISIBLE_DEVICES": env["CUDA_VISIBLE_DEVICES"]},
    )
    assert env["CUDA_VISIBLE_DEVICES"].lower() in {"0", "gpu-0abc"}


@pytest.mark.parametrize("facts", [{"env": {"BASH_ENV": "x.sh"}}, {"id": "another"}, {"gpus": [{"uuid": 5}]}], ids=str)
async def test_a_grant_that_is_not_believed_is_released_and_said(facts: dict[str, Any]) -> None:
    async def grant(seen: Seen) -> tuple[int, Any]:
        return 201, lease(seen.lease_id, "active", **facts)

    scripted = ScriptedLeases(put=grant)
    with ForeignServer(scripted.behaviour()) as foreign:
        async with GPUWorkerPoolClient(foreign.url) as client:
            with pytest.raises(RequestRefusedError, match=r"its grant is not used.*which program answers"):
                await client.request_gpu(timeout=30)
        assert {seen.lease_id for seen in foreign.asked("PUT")} == set(scripted.deleted)


async def test_a_servers_words_are_logged_without_control_characters(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "1")

    async def lose(seen: Seen) -> tuple[int, Any]:
        return 200, {"renewed": [], "lost": [{"id": id_, "reason": "gone\x1b[2J\x07"} for id_ in seen.json["ids"]]}

    with ForeignServer(ScriptedLeases(renew=lose).behaviour()) as foreign, caplog.at_level(logging.INFO):
        async with GPUWorkerPoolClient(foreign.url) as client:
            assignment = await client.request_gpu(timeout=30)
            assert assignment.lost is not None
            await assignment.lost.wait()
    said = [record.getMessage() for record in caplog.records if "gone" in record.getMessage()]
    assert said
    assert all(line.isprintable() for line in said)
