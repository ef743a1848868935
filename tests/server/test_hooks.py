"""A real server tells real receivers of what happens to its leases, and waits for none of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from gpu_worker_pool.server.hooks import idle_leases, unknown_nodes
from gpu_worker_pool.testing import ServerProcess
from tests.core.build import Box, reading
from tests.gpus.fake_nvidia_smi import install
from tests.notify.receiver import Receiver, receiver
from tests.server.leasing import OFTEN, eventually, new_id, put

SOON_S = 30.0


def rules(folder: Path, at: Receiver, *more: str) -> dict[str, str]:
    path = folder / "hooks.toml"
    allow = f'allow = ["{at.url}"]\n'
    path.write_text("\n".join([allow, *more]), encoding="utf-8")
    path.chmod(0o600)
    return {"SIMULATED_GPUS": "1", "GPU_POOL_HOOKS_FILE": str(path), **OFTEN}


def test_the_life_of_a_lease_is_told_in_order_also_by_a_receiver_that_failed_first(tmp_path: Path) -> None:
    with receiver(500) as at:
        hook = f'[[hook]]\non = ["granted", "lost", "ended"]\nurl = "{at.url}"\n'
        with ServerProcess(rules(tmp_path, at, hook)) as server:
            lease = new_id()
            put(server, lease, owner="ada", labels={"job": "train"})
            server.ask(f"/admin/leases/{lease}/revoke?reason=a+course", "POST")

            refused, granted, lost, ended = (at.next().json for _ in range(4))

    assert refused == granted
    assert (granted["on"], granted["lease_id"], granted["owner"]) == ("granted", lease, "ada")
    assert granted["labels"] == {"job": "train"}
    assert len(granted["gpus"]) == 1
    assert (lost["on"], lost["reason"], lost["why"]) == ("lost", "revoked", "a course")
    assert (ended["on"], ended["gpus"]) == ("ended", granted["gpus"])
    assert len({granted["id"], lost["id"], ended["id"]}) == 3


def test_a_receiver_that_hangs_is_in_the_way_of_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told\necho >> {tmp_path}/told\n", encoding="utf-8")
    program.chmod(0o700)
    with receiver(None, None) as at:
        hooks = (
            f'[[hook]]\non = ["granted"]\nurl = "{at.url}"\n',
            f'[[hook]]\non = ["granted"]\ncommand = ["{program}"]\n',
        )
        with ServerProcess(rules(tmp_path, at, *hooks)) as server:
            for _ in range(3):
                lease = new_id()
                assert put(server, lease, wait_s=20).status == 201
                assert server.ask(f"/leases/{lease}", "DELETE").status == 200
            eventually(
                lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text().count("\n") >= 3, "three calls"
            )
            told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines() if line]
            assert [each["on"] for each in told] == ["granted"] * 3
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(SOON_S)
            assert "notices were not sent, because this program ends" in server.log()


def test_an_idle_lease_and_a_silent_driver_are_told_once(tmp_path: Path) -> None:
    smi = install(tmp_path)
    smi.say("0, GPU-aaaa, NVIDIA A100, 81920, 10, 0, 41, 61.50, 400.00\n")
    with receiver() as at:
        hook = f'[[hook]]\non = ["idle", "node_unknown", "ended"]\nurl = "{at.url}"\n'
        env = {**rules(tmp_path, at, hook), **smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}
        with ServerProcess({**env, "GPU_POOL_IDLE_AFTER": "1", "GPU_POOL_NODE": "box"}) as server:
            lease = new_id()
            put(server, lease, owner="ada")
            idle = at.next().json
            smi.say({"hang": True})
            unknown = at.next().json
            server.ask(f"/leases/{lease}", "DELETE")
            ended = at.next().json

    assert (idle["on"], idle["lease_id"], idle["owner"]) == ("idle", lease, "ada")
    assert (unknown["on"], unknown["node"], unknown["lease_id"]) == ("node_unknown", "box", None)
    assert ended["on"] == "ended"


def test_a_file_with_a_mistake_is_said_and_the_pool_goes_on(tmp_path: Path) -> None:
    with receiver() as at:
        hook = '[[hook]]\non = ["granted"]\nurl = "http://169.254.169.254/"\n'
        with ServerProcess(rules(tmp_path, at, hook)) as server:
            assert put(server, new_id()).status == 201
            assert "no hook is told of anything" in server.log()
            assert "`allow` does not name it" in server.log()


def test_a_node_is_unknown_when_none_of_its_gpus_was_read_lately() -> None:
    box = Box(reading(0), reading(1))
    assert unknown_nodes(box.state, box.now) == set()

    later = box.now + box.state.settings.stale_after_s + 1.0

    assert unknown_nodes(box.state, later) == {next(iter(box.state.slots)).node}


def test_a_lease_is_idle_when_its_gpus_compute_nothing_for_long() -> None:
    box = Box(reading(0), idle_after_s=100.0, stale_after_s=1e9)
    box.ask("a")
    assert idle_leases(box.state, box.now) == set()

    assert idle_leases(box.state, box.now + 1_000.0) == {"a"}
