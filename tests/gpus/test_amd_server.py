"""A server of a box with AMD GPUs, from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, eventually, get, queue, release, take
from tests.server.running import ROOT

from .amd_server import COMMAND
from .amd_tree import GB, RX7900, AmdCard, AmdTree

FIRST, SECOND = "GPU-5afd2ff3c7a4c1d8", "GPU-0000000000c0ffee"


@pytest.fixture
def cards(tmp_path: Path) -> list[AmdCard]:
    tree = AmdTree(tmp_path)
    tree.add_card(2, vram=GB // 2, unique_id=None)  # a part of the processor
    return [tree.add_card(3), tree.add_card(0x83, unique_id=0xC0FFEE, model=RX7900, vram=24 * GB)]


@pytest.fixture
def server(tmp_path: Path, cards: list[AmdCard]) -> Iterator[ServerProcess]:
    with ServerProcess({**OFTEN, "AMD_TREE": str(tmp_path), "GPU_POOL_LOCK_SCOPE": "amd"}, command=COMMAND) as running:
        yield running


def test_statistics_have_the_keys_of_the_documents(server: ServerProcess) -> None:
    stats = server.json("/gpu/stats")
    assert [gpu["name"] for gpu in stats["gpus"]] == ["AMD Instinct MI300X OAM", "AMD Radeon RX 7900 XTX"]
    first = stats["gpus"][0]
    assert (first["gpu_id"], first["uuid"], first["memory"]["total_mb"]) == (1, FIRST, 192 * 1024)
    assert (first["utilization_percent"], first["temperature_c"]) == (7, 41)
    assert first["power"] == {"draw_w": 140.0, "limit_w": 750.0}


def test_a_grant_shows_its_gpu_to_rocm_by_its_uuid_and_to_programs_inside_it(server: ServerProcess) -> None:
    lease = take(server, model="7900")
    assert lease["env"] == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": SECOND,
        "ROCR_VISIBLE_DEVICES": SECOND,
        "HIP_VISIBLE_DEVICES": "0",
    }
    shown = "echo $ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES $CUDA_VISIBLE_DEVICES"
    run = [sys.executable, "-m", "gpu_worker_pool", "run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GPU_SERVICE_ENDPOINT": server.url}
    for command in ([*run, "--", "sh", "-c", shown], [*run, "--", *run, "--", "sh", "-c", shown]):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.stdout == f"{FIRST} 0 {FIRST}\n", done.stderr
    release(server, lease["id"])


def test_a_gpu_that_is_being_reset_is_not_granted_and_says_why(server: ServerProcess, cards: list[AmdCard]) -> None:
    cards[0].refuse("mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent")
    reason = "it is being reset"
    eventually(lambda: reason in str(server.json("/pool")), "the fault is seen")
    other = take(server)
    assert other["gpus"][0]["uuid"] == SECOND
    waiter = queue(server)
    assert reason in get(server, waiter["id"])["reason"] + str(get(server, waiter["id"])["obstacles"])
    for name in ("mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent"):
        (cards[0].folder / name).rmdir()
    cards[0].set(mem_info_vram_total=192 * GB, mem_info_vram_used=GB, gpu_busy_percent=0)
    assert get(server, waiter["id"], wait_s=30)["gpus"][0]["uuid"] == FIRST
    release(server, waiter["id"])
    release(server, other["id"])


def test_a_gpu_whose_use_is_unknown_is_not_granted(server: ServerProcess, cards: list[AmdCard]) -> None:
    for card in cards:
        card.set(gpu_busy_percent=None)
    eventually(lambda: all(gpu["state"] == "unknown" for gpu in server.json("/pool")["gpus"]), "it is not known")
    waiter = queue(server)
    assert "utilization is unknown" in str(get(server, waiter["id"])["obstacles"])
    release(server, waiter["id"])
