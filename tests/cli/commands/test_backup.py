"""`gpu-pool backup` and `restore` on a real server, with holders that the backup does not know."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_worker_pool.core.decider.condense import FENCES_AHEAD
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, environment, gpu_pool
from tests.gpus.fake_nvidia_smi import install
from tests.other_user import ALICE, folder_of
from tests.server.leasing import get, take


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three GPUs that are not simulated: their holders are recorded for other servers of the machine."""
    smi = install(tmp_path_factory.mktemp("smi"))
    smi.say(rows(3))
    scope = {"GPU_POOL_LOCK_SCOPE": f"test-{secrets.token_hex(4)}"}
    env = {**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", "GPU_POOL_NODE": "box", **scope}
    with ServerProcess(env) as running:
        yield running


def rows(gpus: int) -> str:
    return "".join(f"{index}, GPU-{index}, NVIDIA A100, 81920, 0, 0, 41, 61.50, 400.00\n" for index in range(gpus))


def settings(server: ServerProcess) -> dict[str, str]:
    names = ("PATH", "FAKE_NVIDIA_SMI_CONFIG", "LD_LIBRARY_PATH", "GPU_POOL_STATE_DIR", "GPU_POOL_LOCK_SCOPE")
    return {"GPU_POOL_NODE": "box", **{name: server.env[name] for name in names}}


def killed_at(failpoint: str, *arguments: str, env: dict[str, str]) -> int:
    own = environment(None, {**env, "GPU_POOL_FAILPOINT": failpoint})
    with subprocess.Popen([*GPU_POOL, *arguments], env=own) as process:
        return process.wait()


def test_a_gpu_that_was_granted_after_the_backup_is_not_granted_again(server: ServerProcess, tmp_path: Path) -> None:
    env, copy = settings(server), tmp_path / "pool.backup"
    with ExitStack() as stack:
        old = take(server)
        assert called("token", "add", "bob", "--json", server=server).code == 0
        # Killed before its end: nothing has the name, which is free for the next one.
        assert killed_at("in_backup", "backup", str(copy), env=env) == -signal.SIGKILL
        assert not copy.exists()
        made = gpu_pool("backup", str(copy), env=env)
        assert (made.code, "1 lease, 0 waiting, 0 ended" in made.out) == (0, True), made
        # Held by a process that another one names by HTTP, under a lease that the backup does not know.
        holder = stack.enter_context(subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE))
        stack.callback(holder.kill)
        assert called("token", "revoke", "bob", server=server).code == 0
        later = take(server, pid=holder.pid, host=socket.gethostname())
        assert later["is_local"]
        running = gpu_pool("restore", "--force", str(copy), env=env)
        assert (running.code, f"pid {server.pid}" in running.err) == (125, True)

        server.kill()
        refused = gpu_pool("restore", str(copy), env=env)
        assert (refused.code, "--force" in refused.err) == (125, True)
        # Killed half-way: no server grants anything then.
        assert killed_at("in_replacement", "restore", "--force", str(copy), env=env) == -signal.SIGKILL
        server.start()
        assert not server.json("/health")["can_grant"]
        server.kill()
        # It does not see which GPUs there are; one was added meanwhile.
        done = gpu_pool("restore", str(copy), env={**env, "PATH": "/nowhere"})
        assert (done.code, "1 lease, " in done.out, "Tokens of bob" in done.out) == (0, True, True), done
        install(Path(env["FAKE_NVIDIA_SMI_CONFIG"]).parent).say(rows(4))
        server.start()

        pool = server.json("/pool")
        assert [lease["id"] for lease in pool["leases"]] == [old["id"]]
        assert [gpu["is_out_of_service"] for gpu in pool["gpus"]] == [True] * 4
        assert server.ask("/leases/early", "PUT", body={}).json["state"] == "queued"
        # All but the GPU that a lease after the backup has: no reading shows that, so its operator must know.
        taken = later["gpus"][0]["gpu_id"]
        assert gpu_pool("undrain", *(str(index) for index in range(3) if index != taken), server=server).code == 0
        early = get(server, "early", wait_s=20)
        assert early["fence"] > FENCES_AHEAD
        assert len({gpu["uuid"] for lease in (old, later, early) for gpu in lease["gpus"]}) == 3


def test_a_box_of_a_fleet_is_told_how_its_database_is_backed_up(tmp_path: Path) -> None:
    for command in ("backup", "restore"):
        done = called(command, str(tmp_path / "file"), env={"GPU_POOL_FLEET": "postgresql://ada:secret@db/pool"})
        assert (done.code, "gpu_pool" in done.err, "secret" in done.err) == (125, True, False)
    assert not list(tmp_path.iterdir())


def test_a_journal_under_another_name_is_found_if_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ServerProcess({"GPU_POOL_NODE": "box"}) as simulated:
        state = {"GPU_POOL_STATE_DIR": str(simulated.state_dir)}
        named = simulated.state_dir / "simulated-box.sqlite3"
        found = called("backup", "file", env=state)
        assert (found.code, "0 leases, 0 waiting, 0 ended" in found.out, str(named) in found.err) == (0, True, True)

        # Which one a backup goes into is not guessed.
        refused = called("restore", "file", env=state)
        assert (refused.code, f"--journal: {named}, {named.with_name('leases.sqlite3')}" in refused.err) == (125, True)

        # With `sudo -u` the current directory is often one of root: the settings there are not needed then.
        Path(".env").write_bytes(b"\xff")
        assert called("backup", "file2", env=state).code == 2
        assert called("backup", "file2", "--journal", str(named), env=state).code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_left_to_that_user(server: ServerProcess, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert called("backup", str(copy), env=settings(server)).code == 0
    folder = folder_of(ALICE, tmp_path / "alice")

    done = called("restore", str(copy), "--journal", str(folder / "leases.sqlite3"), env=settings(server))

    assert (done.code, f"sudo -u '#{ALICE}'" in done.err) == (125, True)
    assert not list(folder.iterdir())


def test_the_journal_of_the_server_that_runs_is_backed_up(tmp_path: Path) -> None:
    """The lab's bug 8: a server without a GPU had left an empty journal, which was copied and called checked."""
    env = {"GPU_POOL_STATE_DIR": str(tmp_path / "state"), "SIMULATED_GPUS": "", "PATH": "/nowhere"}
    with ServerProcess(env):
        pass
    with ServerProcess({"GPU_POOL_STATE_DIR": str(tmp_path / "state"), "SIMULATED_GPUS": "2"}) as server:
        assert len(list((tmp_path / "state").glob("*.sqlite3"))) == 2
        take(server)
        mine = {"GPU_POOL_STATE_DIR": str(tmp_path / "state")}
        made = gpu_pool("backup", str(tmp_path / "one"), env=mine)
        assert (made.code, "1 lease, " in made.out) == (0, True), made
    for command in (("backup", str(tmp_path / "two")), ("restore", "--force", str(tmp_path / "one"))):
        unclear = gpu_pool(*command, env=mine)
        assert unclear.code == 125
        assert "Name the one you mean with --journal" in unclear.err
