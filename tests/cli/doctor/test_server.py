"""What `gpu-pool doctor` thinks of this machine as a server, from made-up facts."""

from __future__ import annotations

import errno
import json
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpu_worker_pool.cli.doctor import server
from gpu_worker_pool.cli.doctor.finding import judge_settings
from gpu_worker_pool.cli.serve.port_holder import PortHolder, find_server
from gpu_worker_pool.host.gpu_lock import LockHolder
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.service import FleetView, Health
from tests.cli.doctor.facts import TOKEN
from tests.server.told_server import Told, told_server

IN_USE = OSError(errno.EADDRINUSE, "in use")
OURS = PortHolder("http://localhost:8000", "box", 4, "nvml")


@pytest.mark.parametrize(
    ("port", "is_client_only", "status"),
    [
        (server.Port("0.0.0.0", 8000), False, "ok"),  # noqa: S104 - nothing listens
        (server.Port("127.0.0.1", 8000, IN_USE, OURS), False, "ok"),
        (server.Port("127.0.0.1", 8000, IN_USE), False, "problem"),
        (server.Port("127.0.0.1", 8000, IN_USE), True, "warning"),
        (server.Port("no.such.host", 8000, socket.gaierror(-2, "unknown")), False, "problem"),
        (server.Port("127.0.0.1", 80, PermissionError(errno.EACCES, "no")), False, "problem"),
    ],
)
def test_a_port_is_free_or_ours_or_somebody_elses(port: server.Port, is_client_only: bool, status: str) -> None:
    finding = server.judge_port(port, is_client_only=is_client_only)

    assert finding.status == status
    assert status == "ok" or finding.advice


def test_a_box_without_a_leader_is_a_server_of_ours() -> None:
    fleet = FleetView(id=None, role="follower", epoch=3, leader=None, leader_url=None, lag_s=None)
    health = Health(
        status="degraded",
        nvidia_smi_available=True,
        timestamp="2026-11-17T10:00:00Z",
        reason="no box leads the fleet",
        source="nvml",
        gpu_count=4,
        reading_age_s=0.1,
        can_grant=False,
        fleet=fleet,
    )
    refusal = Told(b'{"title": "no leader", "status": 503, "detail": "no box leads the fleet"}', 503)
    with told_server({"/pool": refusal, "/health": Told(json.dumps(asdict(health)).encode(), 503)}) as box:
        found = find_server("127.0.0.1", box.server_port)
        assert found == PortHolder(box.url, "a box that has no leader now", 4, "nvml")
        box.answers["/health"] = Told(b'{"status": "healthy"}')
        assert find_server("127.0.0.1", box.server_port) is None, "it is another program"


def test_whose_servers_have_the_gpus_of_this_machine() -> None:
    bob = LockHolder(7, "bob", "http://localhost:8000")

    (finding,) = server.judge_authority({bob: [0, 2]})

    assert finding.status == "ok"
    assert finding.message == "the server of bob (pid 7) grants these GPUs of this machine: 0, 2"
    assert finding.advice == "use that one: --endpoint http://localhost:8000"


STATE = server.StateDir(
    Path("/s/leases.sqlite3"), Path("/s"), is_writable=True, free_mb=1e5, file_system="ext4", holder_pid=7
)


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        (STATE, "ok", "in use by the server with pid 7"),
        (replace(STATE, nearest=Path("/"), holder_pid=None), "ok", "can be made"),
        (replace(STATE, is_writable=False), "problem", "cannot be written to"),
        (replace(STATE, nearest=Path("/"), is_writable=False), "problem", "cannot be made"),
        (replace(STATE, free_mb=100.0), "warning", "only 100 MiB are free"),
        (replace(STATE, free_mb=5.0), "problem", "only 5 MiB are free"),
        (replace(STATE, file_system="tmpfs"), "warning", "in memory"),
        (replace(STATE, file_system="nfs4"), "warning", "network file system"),
        (replace(STATE, file_system="fuse.sshfs"), "warning", "network file system"),
        (replace(STATE, file_system=None), "ok", "there"),
    ],
)
def test_where_the_leases_are_kept(state: server.StateDir, status: str, words: str) -> None:
    (finding,) = server.judge_state_dir(state)

    assert finding.status == status
    assert words in finding.message


def test_the_file_system_is_that_of_the_innermost_mount_and_of_the_last_one_there() -> None:
    mounts = (
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:40 / /mnt/my\\040lab rw shared:1 - nfs4 box:/lab rw\n"
        "31 22 0:41 / /mnt/twice rw - ext4 /dev/vdb rw\n"
        "32 31 0:42 / /mnt/twice rw - tmpfs none rw\n"
    )

    found = [server.file_system_of(Path(path), mounts) for path in ("/mnt/my lab/s", "/mnt/mylab", "/mnt/twice/x")]

    assert found == ["nfs4", "ext4", "tmpfs"]
    assert server.file_system_of(Path("/x"), "") is None


def test_tokens_that_everybody_can_read_are_a_problem(tmp_path: Path) -> None:
    tokens = Tokens.parse(f"ada:{TOKEN}")

    assert [finding.status for finding in server.judge_tokens(tokens, [], None)] == ["ok"]
    assert [finding.status for finding in server.judge_tokens(tokens, [], "/etc/tokens")] == ["problem"]
    assert [finding.status for finding in server.judge_tokens(Tokens.broken(), ["why"], None)] == ["problem"]
    assert [finding.status for finding in server.judge_tokens(Tokens(), [], None)] == ["ok"]
    # The folders of pytest are for one user only, so that the mode of a file in them does not matter.
    (tmp_path / "tokens").touch(0o644)
    assert not server.can_everybody_read(tmp_path / "tokens")
    assert server.can_everybody_read(Path("/etc/passwd"))


def test_a_settings_file_that_cannot_be_read_is_one_problem_and_not_taken_for_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00bad")
    monkeypatch.chdir(tmp_path)
    for name in ("GPU_POOL_TOKENS", "GPU_POOL_TOKENS_FILE"):
        monkeypatch.delenv(name, raising=False)

    settings, heard = server.load_settings()
    (problem,) = judge_settings("server", heard)
    (tokens,) = server.check_tokens(settings, heard)

    assert ".env cannot be read" in problem.message
    assert "correct that file" in str(problem.advice)
    assert "variable" not in str(problem.advice)
    assert tokens.status == "skipped"
    assert ".env" in tokens.message


def test_simulated_gpus_that_hide_real_ones_are_a_warning() -> None:
    assert server.judge_simulated(None, has_gpus=True) is None
    assert [
        finding.status
        for has_gpus in (False, True)
        if (finding := server.judge_simulated("4", has_gpus=has_gpus)) is not None
    ] == ["ok", "warning"]


def test_one_bad_rule_of_the_hooks_file_is_a_problem_of_all_hooks(tmp_path: Path) -> None:
    file = tmp_path / "hooks.toml"
    file.write_text('[[hook]]\non = ["lost"]\ncommand = ["/bin/true"]\n', encoding="utf-8")
    file.chmod(0o600)
    settings = ServerSettings(_env_file=None, gpu_pool_hooks_file=str(file))
    (fine,) = server.check_hooks(settings)
    file.write_text(file.read_text() + '[[hook]]\non = ["gone"]\ncommand = ["/bin/true"]\n', encoding="utf-8")
    (bad,) = server.check_hooks(settings)

    assert (fine.status, bad.status) == ("ok", "problem")
    assert 'hook 2: on.0: "gone" is not valid' in bad.message
