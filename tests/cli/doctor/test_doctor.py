"""`gpu-pool doctor` as a whole: checks that go wrong, and a few looks at real processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.doctor.command import Check, Finding
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import Done, gpu_pool
from tests.gpus.fake_nvidia_smi import install
from tests.gpus.stub_nvml import StubConfig, StubGpu, build
from tests.server.running import ROOT, free_port

TOKEN = "a-long-random-secret"  # noqa: S105 - of nothing
NOWHERE = {"PATH": "/nonexistent", "LD_LIBRARY_PATH": ""}


# --- what a terminal would obey ------------------------------------------------------------------------------------


def test_what_comes_from_outside_is_made_plain() -> None:
    evil = "a\x1b[31m\x07\x9b\u202eb\nc"
    (found,) = Check("x", lambda: [Finding("x", "problem", evil, evil)]).run()

    assert found.message.startswith("a\N{REPLACEMENT CHARACTER}[31m")
    assert found.message.isprintable()
    assert str(found.advice).isprintable()


def test_without_a_server_there_is_a_problem(tmp_path: Path) -> None:
    """The lab's bug 21: it ended with "no problems" where no server could be reached."""
    done = gpu_pool("doctor", "--json", env={**NOWHERE, "PORT": str(free_port()), "HOME": str(tmp_path)}, cwd=tmp_path)
    (endpoint,) = found(done)["endpoint"]
    if endpoint["status"] == "ok":
        pytest.skip("there is a server on port 8000 of this machine")
    assert (done.code, done.json["is_ok"], endpoint["status"]) == (1, False, "problem")
    assert "gpu-pool serve" in endpoint["advice"]


# --- a check that goes wrong ---------------------------------------------------------------------------------------


def test_a_check_that_raises_or_hangs_is_a_finding_itself() -> None:
    def break_down() -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    for_ever = threading.Event()

    def hang() -> list[Finding]:
        for_ever.wait()
        return [Finding("hangs", "ok", "it went on")]

    (broken,) = Check("breaks", break_down).run()
    (hung,) = Check("hangs", hang).run(limit_s=0.01)
    for_ever.set()

    assert (broken.check, broken.status) == ("breaks", "problem")
    assert "ZeroDivisionError: by nothing" in broken.message
    assert (hung.check, hung.status) == ("hangs", "problem")
    assert "did not end" in hung.message


# --- real processes ------------------------------------------------------------------------------------------------


def found(done: Done) -> dict[str, list[dict[str, Any]]]:
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in done.json["findings"]:
        assert finding.keys() == {"check", "status", "message", "advice", "endpoint"}
        by_check.setdefault(finding["check"], []).append(finding)
    return by_check


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"GPU_POOL_TOKENS": f"ada:{TOKEN}"}) as running:
        yield running


def test_it_is_calm_on_a_machine_without_a_gpu_and_without_the_servers_packages(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('not here', name='uvicorn')")
    endpoint = f"http://127.0.0.1:{free_port()}"

    done = gpu_pool(
        "doctor", server=endpoint, env={**NOWHERE, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, cwd=tmp_path
    )

    assert "Traceback" not in done.err
    assert done.err == ""
    assert "warning  gpus" in done.out
    assert "SIMULATED_GPUS=4" in done.out
    assert "skipped  server-packages" in done.out
    assert "pip install 'gpu-worker-pool[server]'" in done.out
    assert "problem  endpoint" in done.out, "somebody said that it is there"
    assert done.out.splitlines()[-1] == "1 problem, 1 warning"
    assert done.code == 1


def test_all_is_well_with_a_driver_and_a_server(running: ServerProcess, tmp_path: Path) -> None:
    library = build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler to build the stub of the driver's library with")
    stub = StubConfig(tmp_path / "nvml.conf", [StubGpu.numbered(0), StubGpu.numbered(1)])
    stub.write()
    smi = install(tmp_path)
    smi.say("".join(f"{n}, {gpu.uuid}, {gpu.name}, 81920, 0, 0, 35, 60, 400\n" for n, gpu in enumerate(stub.gpus)))
    env = {
        **stub.environment(library),
        **smi.environment(),
        "HOST": "127.0.0.1",
        "PORT": str(running.port),
        "GPU_POOL_STATE_DIR": str(running.state_dir),
        "GPU_POOL_TOKEN": TOKEN,
    }

    done = gpu_pool("doctor", "--json", server=running, env=env, cwd=tmp_path)
    checks = found(done)

    assert done.json["schema"] == "gpu-pool/doctor/1"
    assert (done.code, done.json["is_ok"], done.json["problems"]) == (0, True, 0)
    assert checks["gpus"][0]["message"].startswith("2 GPUs: NVIDIA A100")
    assert "4 GPUs, simulated" in checks["port"][0]["message"]
    assert checks["right"][0]["message"] == "127.0.0.1: you may request GPUs as ada, with GPU_POOL_TOKEN"
    assert TOKEN not in done.out + done.err


def test_what_is_wrong_is_told_all_at_once(running: ServerProcess, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def accept_and_hang_up() -> None:
            stranger.accept()[0].close()

        hang_up = threading.Thread(target=accept_and_hang_up, daemon=True)
        hang_up.start()
        env = {
            **NOWHERE,
            "HOST": "127.0.0.1",
            "PORT": str(stranger.getsockname()[1]),
            "MAX_HISTORY": "many",
            "GPU_POLLING_INTERVAL": "-3",
            "GPU_POOL_TOKENS_FILE": "/nonexistent/tokens",
            "GPU_POOL_STATE_DIR": "/proc/nothing/here",
            "GPU_POOL_TOKEN": f"not-{TOKEN}",
            "GPU_MEMORY_THRESHOLD_PERCENT": "0",
        }
        done = gpu_pool("doctor", "--json", server=running, env=env, cwd=tmp_path)
        hang_up.join()
    checks = found(done)

    assert done.code == 1
    problems = {name for name, findings in checks.items() if any(f["status"] == "problem" for f in findings)}
    assert problems == {"server-settings", "state-dir", "tokens", "client-settings", "right"}
    assert [each["status"] for each in checks["port"]] == ["warning"]
    assert "MAX_HISTORY='many'" in checks["server-settings"][0]["message"]
    assert "This token is not known" in checks["right"][0]["message"]
    assert TOKEN not in done.out + done.err
    assert done.err == ""
