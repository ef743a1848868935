"""A real server tells real receivers of what happens to its leases, and waits for none of them."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import install
from tests.notify.receiver import receiver
from tests.server.leasing import OFTEN, eventually, get, new_id, put

SOON_S = 30.0


def rules(folder: Path, *hooks: str) -> dict[str, str]:
    path = folder / "hooks.toml"
    path.write_text("\n".join(hooks), encoding="utf-8")
    path.chmod(0o600)
    return {"SIMULATED_GPUS": "1", "GPU_POOL_HOOKS_FILE": str(path), **OFTEN}


def test_the_life_of_a_lease_is_told_in_order_also_by_a_receiver_that_failed_first(tmp_path: Path) -> None:
    with receiver(500) as at:
        hook = f'[[hook]]\non = ["granted", "lost", "ended"]\nurl = "{at.url}"\n'
        with ServerProcess(rules(tmp_path, hook)) as server:
            lease = new_id()
            put(server, lease, owner="ada", labels={"command": "train.py"})
            server.ask(f"/admin/leases/{lease}/revoke?reason=a+course", "POST")

            refused, granted, lost, ended = (at.next() for _ in range(4))
            node = server.json("/pool")["node"]

    assert refused.body == granted.body
    where = f"GPU 0 of {node}"
    assert (granted.title, granted.details["Lease"]) == (f"ada's train.py has {where}", lease)
    assert lost.title == f"ada's train.py lost {where}: revoked by {lost.details['Reason'].removeprefix('revoked by ')}"
    assert (lost.details["Details"], lost.details["GPUs"]) == ("a course", where)
    assert ended.title.startswith("ada's train.py ended: revoked")


def test_a_receiver_that_hangs_is_in_the_way_of_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told\n", encoding="utf-8")
    program.chmod(0o700)
    with receiver(None, None) as at:
        hooks = (
            f'[[hook]]\non = ["granted"]\nurl = "{at.url}"\n',
            f'[[hook]]\non = ["granted"]\ncommand = ["{program}"]\n',
        )
        with ServerProcess(rules(tmp_path, *hooks)) as server:
            for _ in range(3):
                lease = new_id()
                assert put(server, lease, wait_s=20).status in {201, 202}
                assert get(server, lease, wait_s=20)["state"] == "active"
                assert server.ask(f"/leases/{lease}", "DELETE").status == 200
            eventually(
                lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text().count("\n") >= 3, "three calls"
            )
            told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines() if line]
            assert [each["on"] for each in told] == ["granted"] * 3
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(SOON_S)
            assert "notices that were not sent, because this program ends" in server.log()


def test_an_idle_lease_and_a_silent_driver_are_told_once(tmp_path: Path) -> None:
    smi = install(tmp_path)
    smi.say("0, GPU-aaaa, NVIDIA A100, 81920, 10, 0, 41, 61.50, 400.00\n")
    with receiver() as at:
        hook = f'[[hook]]\non = ["idle", "node_unknown", "ended"]\nurl = "{at.url}"\n'
        env = {**rules(tmp_path, hook), **smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}
        with ServerProcess({**env, "GPU_POOL_IDLE_AFTER": "1", "GPU_POOL_NODE": "box"}) as server:
            lease = new_id()
            put(server, lease, owner="ada")
            idle = at.next()
            smi.say({"hang": True})
            unknown = at.next()
            server.ask(f"/leases/{lease}", "DELETE")
            ended = at.next()

    assert (idle.title, idle.details["Owner"]) == (f"ada's lease {lease} computes nothing on GPU 0 of box", "ada")
    assert unknown.title == "Nothing is known of node box: its GPUs have not been read lately"
    assert ended.title == f"ada's lease {lease} ended: released by root"


def test_a_file_with_a_mistake_is_said_and_the_pool_goes_on(tmp_path: Path) -> None:
    hook = '[[hook]]\non = ["granted"]\nurl = "https://lab.example/s3cr3t"\n'
    with ServerProcess(rules(tmp_path, hook)) as server:
        assert put(server, new_id()).status == 201
        assert "no hook is told of anything" in server.log()
        assert "write jsons:// instead of https://" in server.log()
        assert "s3cr3t" not in server.log()


def test_a_program_is_told_while_more_than_a_thousand_connections_are_open(tmp_path: Path) -> None:
    """An anonymous caller silenced the operator's pager with 1,100 open connections: the guard could not select()."""
    hook = f'[[hook]]\non = ["granted"]\ncommand = ["/bin/sh", "-c", "cat > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/told"]\n'
    with ServerProcess(rules(tmp_path, hook)) as server, ExitStack() as opened:
        for _ in range(1_100):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert put(server, new_id(), owner="ada").status == 201
        eventually((tmp_path / "told").exists, "the program was told")
