"""`gpu-pool serve`: what wins over what, what it says when it is ready, how it ends, and why it may not start."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.serve.announcement import Announcement, GpusShown, Writing
from gpu_worker_pool.cli.serve.command import FLAGS, settings_of, usable_journal
from gpu_worker_pool.cli.serve.port_holder import PortHolder, find_server
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.addresses import urls
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.service import FleetView, Health
from tests.cli.own_process import GPU_POOL, environment, gpu_pool, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.gpus.fake_nvidia_smi import install
from tests.server.running import ROOT, ask_over
from tests.server.told_server import Told, told_server

SECRET = "a-long-random-secret"  # noqa: S105 - of nothing


class Serving:
    """A started `gpu-pool serve --json` that has said that it is ready."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str]) -> None:
        self.process = start_gpu_pool("serve", "--json", *flags, cwd=folder, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.said: dict[str, Any] = json.loads(line)

    def json(self, path: str) -> Any:
        # At the first attempt: ready means that it answers.

        host, _, port = self.said["urls"][0].removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            return ask_over(connection, path).json
        finally:
            connection.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With .env, environment and flags that say three different things."""
    folder = tmp_path_factory.mktemp("serve")
    tokens = folder / "tokens"
    tokens.write_text(f"ada:{SECRET}\nbob:another-{SECRET}\n")
    (folder / ".env").write_text("GPU_POOL_NODE=by-file\nREFRESH_INTERVAL=7\nSIMULATED_GPUS=1\nMAX_HISTORY=13\n")
    env = {"REFRESH_INTERVAL": "8", "SIMULATED_GPUS": "2", "MAX_HISTORY": "many", "HOST": "127.0.0.1"}
    flags = ("--port", "0", "--simulated-gpus", "2xT4,1xA10", "--state-dir", str(folder / "state"))
    server = Serving(folder, *flags, env={**env, "GPU_POOL_TOKENS_FILE": str(tokens)})
    yield server
    server.process.kill()
    server.process.communicate()


def test_flags_win_over_the_environment_and_that_over_the_file(serving: Serving) -> None:
    config = serving.json("/config")

    assert [gpu["name"] for gpu in serving.json("/gpu/stats")["gpus"]] == [
        "Simulated Tesla T4",
        "Simulated Tesla T4",
        "Simulated NVIDIA A10",
    ]
    assert config["monitoring"]["refresh_interval"] == 8
    assert serving.json("/pool")["node"] == "by-file"
    assert config["monitoring"]["max_history"] == 100, "no good in the environment: logged, and the default is used"


def test_what_it_says_when_it_is_ready(serving: Serving) -> None:
    said = serving.said

    assert said["schema"] == "gpu-pool/serve/1"
    assert said["pid"] == serving.process.pid
    assert said["docs"] == f"{said['urls'][0]}/docs"
    assert said["gpus"]["count"] == 3
    assert said["gpus"]["models"] == {"Simulated Tesla T4": 2, "Simulated NVIDIA A10": 1}
    assert said["gpus"]["source"] == "simulated"
    assert Path(said["state"]).is_file()
    assert said["can_grant"] is True
    assert said["writing"] == {"without_token_here": True, "tokens": "set", "names": ["ada", "bob"]}
    assert SECRET not in json.dumps(said)


def test_a_second_one_on_the_same_port_or_the_same_leases_does_not_start(serving: Serving, tmp_path: Path) -> None:
    host, port = "127.0.0.1", serving.said["urls"][0].rpartition(":")[2]

    same_port = gpu_pool(
        "serve", "--host", host, "--port", port, cwd=tmp_path, env={"GPU_POOL_STATE_DIR": str(tmp_path)}
    )
    state = Path(serving.said["state"]).parent
    flags = ("--host", host, "--port", "0", "--simulated-gpus", "1", "--log-level", "critical")
    same = {"GPU_POOL_NODE": "by-file"}
    same_leases = gpu_pool("serve", *flags, "--state-dir", str(state), cwd=tmp_path, env=same)

    assert (same_port.code, same_port.out) == (125, "")
    assert "a GPU server runs there already (by-file, 3 GPUs)" in same_port.err
    assert f"use that one: gpu-pool run --endpoint http://{host}:{port} -- CMD" in same_port.err.replace("\n", " ")
    assert "another port" not in same_port.err
    assert (same_leases.code, same_leases.out) == (125, "")
    assert len(same_leases.err.splitlines()) == 1
    assert f"in use by the process with pid {serving.process.pid}" in same_leases.err


def test_control_c_ends_it_and_people_are_told_in_words(tmp_path: Path) -> None:
    flags = ("--port", "0", "--host", "127.0.0.1", "--state-dir", str(tmp_path))
    env = {"PATH": "/nonexistent", "LD_LIBRARY_PATH": ""}
    with start_gpu_pool("serve", *flags, "--log-level", "error", cwd=tmp_path, env=env) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "use it" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=30)
        finally:
            process.kill()

    assert "GPUs        none (" in said
    assert "gpu-pool doctor" in said
    assert "--simulated-gpus 4" in said
    assert str(tmp_path / "leases.sqlite3") in said
    assert "no other machine can reach 127.0.0.1" in said
    assert (process.returncode, log) == (130, "")


def test_a_server_whose_gpus_another_server_has_says_whose_and_how_to_use_that_one(tmp_path: Path) -> None:
    smi = install(tmp_path)
    smi.say("0, GPU-aaaa, NVIDIA A100, 81920, 0, 0, 41, 61.50, 400.00\n")
    env = {**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", "GPU_POOL_LOCK_SCOPE": f"test-{tmp_path}"}
    flags = ("--host", "127.0.0.1", "--port", "0", "--state-dir", str(tmp_path / "state"), "--log-level", "critical")
    with ServerProcess(env) as first:
        other = f"another server on this machine has this GPU (user {user_name()}, pid {first.pid}); use it at"
        second = Serving(tmp_path, *flags, env=env)
        try:
            assert second.said["can_grant"] is False
            assert second.said["trouble"].startswith(f"{other} http://localhost:{first.port}, or end it")
            assert second.said["gpus"] == {
                "count": 1,
                "installed": 1,
                "models": {"NVIDIA A100": 1},
                "source": "nvidia-smi",
                "error": None,
            }
            assert second.json("/gpu/count")["gpu_count"] == 1
        finally:
            second.process.kill()
            second.process.communicate()


# --- what was typed wrong ------------------------------------------------------------------------------------------


def test_a_bad_flag_is_one_clear_line_and_nothing_is_started(tmp_path: Path) -> None:
    done = gpu_pool("serve", "--port", "99999", "--state-dir", str(tmp_path / "state"), cwd=tmp_path)

    assert (done.code, done.out) == (2, "")
    assert done.err == "gpu-pool: --port is 99999: it must be a whole number from 0 to 65535\n"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("simulated_gpus", "3xZX81", "not a known model"),
        ("log_level", "loud", "one of debug, info"),
    ],
)
def test_a_bad_flag_is_named_with_what_is_possible(name: str, value: object, words: str) -> None:
    with pytest.raises(Failure, match=FLAGS[name]) as failure:
        settings_of({name: value}, FLAGS)

    assert failure.value.code == 2
    assert words in str(failure.value)


def test_a_settings_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00bad")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(Failure, match=r"\.env in this folder cannot be read: it is not UTF-8; fix it") as failure:
        settings_of({"port": 0}, FLAGS)

    assert failure.value.code == 2


def test_a_named_file_is_read_instead_of_env_and_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT", "5001")
    (tmp_path / ".env").write_text("MAX_HISTORY=7\n")
    # A file that was named is the operator's word, though it has settings of other programs.
    (tmp_path / "server.env").write_text("DATABASE_URL=postgres://x\nTITLE=Named\nPORT=5000\n")

    settings = settings_of({}, FLAGS, Path("server.env"))

    assert (settings.title, settings.max_history, settings.port) == ("Named", 100, 5001)
    with pytest.raises(Failure, match=r"^--env-file none\.env cannot be read: No such file or directory"):
        settings_of({}, FLAGS, Path("none.env"))


def test_another_projects_file_and_the_host_of_tcsh_configure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".env").write_text("DATABASE_URL=postgres://x\nCUDA_VISIBLE_DEVICES=1\nPORT=5000\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOST": socket.gethostname(), "HOSTTYPE": "x86_64-linux", "MACHTYPE": "x86_64"}.items():
        monkeypatch.setenv(name, value)

    settings = settings_of({"gpu_pool_node": "box"}, FLAGS)

    assert (settings.host, settings.port, settings.cuda_visible_devices) == ("0.0.0.0", 8000, None)  # noqa: S104
    assert (
        "another project's, as it has DATABASE_URL; it is left out, with its CUDA_VISIBLE_DEVICES, PORT" in caplog.text
    )
    assert "was set by tcsh and is left out" in caplog.text


def test_a_state_directory_that_cannot_be_made_is_told_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"

    with pytest.raises(Failure, match="Not a directory; set --state-dir") as failure:
        usable_journal(settings_of({"gpu_pool_state_dir": str(folder)}, FLAGS))

    assert failure.value.code == 125
    assert str(folder) in str(failure.value)


def test_without_the_packages_of_the_server_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('not here', name='uvicorn')")

    done = gpu_pool("serve", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, cwd=tmp_path)

    assert done.code == 125
    assert "needs uvicorn, which is not installed" in done.err
    assert "pip install 'gpu-worker-pool[server]'" in done.err
    assert len(done.err.splitlines()) == 1


# --- what is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", ["http://localhost:80/p", "http://box:80/p", "http://10.0.0.7:80/p"]),  # noqa: S104 - nothing listens
        ("::", ["http://localhost:80/p", "http://box:80/p", "http://10.0.0.7:80/p"]),
        ("127.0.0.1", ["http://localhost:80/p"]),
        ("::1", ["http://[::1]:80/p"]),
        ("10.0.0.7", ["http://10.0.0.7:80/p"]),
    ],
)
def test_the_addresses_are_those_it_can_be_reached_under(host: str, expected: list[str]) -> None:
    assert urls(host, 80, "/p", names=["box", "10.0.0.7"]) == expected


@pytest.mark.parametrize(
    ("writing", "words"),
    [
        (
            Writing("none", (), is_open_here=True, local_url="http://localhost:9000"),
            (
                "every user of this machine, for their own leases; other machines can view but not request GPUs; to allow a user, "
                "run gpu-pool token add NAME --endpoint http://localhost:9000"
            ),
        ),
        (
            Writing("none", (), is_open_here=False),
            "only callers with a token, also on this machine; other machines can view but not request GPUs; to allow a user, set GPU_POOL_TOKENS_FILE",
        ),
        (
            Writing("set", ("ada", "bob"), is_open_here=True),
            "every user of this machine, for their own leases; from anywhere with a token: ada, bob",
        ),
        # A caller of 10.0.0.7 does not come from loopback, on the same machine either.
        (
            Writing("set", ("ada",), is_open_here=False),
            "only callers with a token, also on this machine; from anywhere with a token: ada",
        ),
    ],
)
def test_who_may_ask_is_said(writing: Writing, words: str) -> None:
    assert writing.text() == words


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (GpusShown.of(["A", "A", "B"], 3, "nvml", None), "3: 2 x A, 1 x B (by nvml)"),
        (GpusShown.of(["A"], 4, "nvml", None), "1 of 4, by CUDA_VISIBLE_DEVICES: 1 x A (by nvml)"),
        (GpusShown.of([], 4, "nvml", None), "none of 4: CUDA_VISIBLE_DEVICES hides them all"),
        (GpusShown.of([], 0, "none", "no driver"), "none (no driver)"),
        (GpusShown.of(["A"], 1, "simulated", None), "1: 1 x A (SIMULATED, not hardware)"),
    ],
)
def test_which_gpus_is_said(gpus: GpusShown, words: str) -> None:
    assert str(gpus) == words


def test_the_way_to_use_it_is_said_unless_nothing_can_be_granted() -> None:
    plain = Announcement(
        version="1",
        pid=1,
        urls=("http://localhost:8000", "http://box:8000"),
        docs=None,
        page="http://localhost:8000/ui",
        gpus=GpusShown.of(["A"], 1, "nvml", None),
        state="/state",
        trouble=None,
        writing=Writing("none", (), is_open_here=True),
        is_default=True,
    )
    assert dict(plain.lines())["use it"] == "gpu-pool run -- CMD"
    assert not {"try it out", "TROUBLE"} & dict(plain.lines()).keys()
    troubled = dict(replace(plain, docs="http://localhost:8000/docs", trouble="the disk is full").lines())
    assert "use it" not in troubled  # it would be refused
    assert troubled["try it out"] == "http://localhost:8000/docs"
    assert "the disk is full" in troubled["TROUBLE"]
    # A client whose environment names another server would not find this one by itself.
    for elsewhere in (replace(plain, is_default=False), replace(plain, urls=("http://localhost:9000",))):
        assert f"--endpoint {elsewhere.urls[0]} " in dict(elsewhere.lines())["use it"]


def test_nobody_reading_what_it_says_does_not_stop_it_and_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    flags = ("--port", "0", "--host", "127.0.0.1", "--simulated-gpus", "1", "--state-dir", str(tmp_path))
    with start_gpu_pool("serve", *flags, cwd=tmp_path, env={"MAX_HISTORY": "many"}) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            log = ""
            while "Application startup complete" not in log:
                line = process.stderr.readline()
                assert line, log
                log += line
            process.send_signal(signal.SIGTERM)
            log += process.stderr.read()
            assert process.wait(timeout=30) in {0, -signal.SIGTERM}
        finally:
            process.kill()

    assert "MAX_HISTORY='many' is not usable" in log
    assert "Finished server process" in log
    assert "Traceback" not in log


def test_in_a_terminal_it_prints_its_banner_and_no_log(tmp_path: Path) -> None:
    flags = ("--port", "0", "--simulated-gpus", "1", "--state-dir", str(tmp_path / "state"))
    with Terminal([*GPU_POOL, "serve", *flags], environment(), cwd=tmp_path) as terminal:
        shown = terminal.wait_for("use it")
        assert shown.startswith("GPU Worker Pool ")
        assert "INFO" not in shown
        assert "WARNING" not in shown
        assert " ".join(shown.split()).count("other machines can view but not request GPUs") == 1
    with Terminal([*GPU_POOL, "serve", *flags, "--log-level", "info"], environment(), cwd=tmp_path) as terminal:
        assert "INFO" in terminal.wait_for("use it")


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
