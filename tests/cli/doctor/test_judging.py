"""What `gpu-pool doctor` thinks of made-up facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.cli.doctor import client, machine, server
from gpu_worker_pool.cli.doctor.finding import complaints, judge_settings
from gpu_worker_pool.cli.doctor.machine import Probed
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.serve.port_holder import PortHolder
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.host.gpu_lock import LockHolder
from gpu_worker_pool.server.settings import ServerSettings
from tests.client.foreign_servers import Behaviour, ForeignServer, internal_error, not_found, saying, statistics


def reading(index: int, fault: str | None = None, uuid: str | None = None) -> Reading:
    return Reading(Gpu(GpuKey("box", uuid or f"GPU-{index}"), index, "A100"), 0.0, fault=fault)


LOADED = "550.54.14"
WORKS = Probed((reading(0), reading(1)), took_s=0.1)
MISSING = Probed(unavailable="it was not found: install it")
HANGS = Probed(error="it has not answered for 20 s")
MIG = Probed((reading(0, uuid="MIG-1"), reading(1, uuid="MIG-2"), reading(2, uuid="MIG-3")))


@pytest.mark.parametrize(
    ("driver", "nvml", "smi", "expected"),
    [
        (None, MISSING, MISSING, ("warning", "skipped", "skipped")),
        (LOADED, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, WORKS, MISSING, ("ok", "ok", "ok")),
        (LOADED, MISSING, WORKS, ("ok", "warning", "ok")),
        (LOADED, MISSING, MISSING, ("ok", "problem", "problem")),
        (LOADED, HANGS, HANGS, ("ok", "problem", "problem")),
        (LOADED, Probed(), Probed(), ("ok", "problem", "problem")),
        # WSL: the driver is Windows'.
        (None, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, Probed((reading(0), reading(1, fault="it is lost"))), WORKS, ("ok", "problem", "ok")),
        (LOADED, WORKS, Probed((reading(0),)), ("ok", "ok", "warning")),
        (LOADED, MIG, Probed((reading(0),)), ("ok", "ok", "ok")),
    ],
)
def test_what_the_driver_nvml_and_nvidia_smi_come_to(
    driver: str | None, nvml: Probed, smi: Probed, expected: tuple[str, str, str]
) -> None:
    judges = (machine.judge_driver, machine.judge_nvml, machine.judge_smi)
    found = [finding for judge in judges for finding in judge(driver, nvml, smi)]

    assert tuple(finding.status for finding in found) == expected
    assert all(finding.advice for finding in found if finding.status in {"warning", "problem"})


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, "ok", "all GPUs are shown"),
        ("1", "ok", "of 2 GPUs these are shown: 1"),
        ("", "warning", "hides all GPUs"),
        ("-1", "warning", "hides all GPUs"),
        ("0,7", "warning", "7"),
    ],
)
def test_visible_devices_as_they_would_be_understood(value: str | None, status: str, words: str) -> None:
    (finding,) = machine.judge_visible_devices(value, WORKS.readings)
    assert (finding.status, words in finding.message) == (status, True)


def test_the_driver_is_found_by_what_the_system_shows(tmp_path: Path) -> None:
    assert machine.driver_version(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu\n"
    )
    assert machine.driver_version(tmp_path) == "550.54.14"


def test_a_port_is_ours_or_another_programs() -> None:
    taken, holder = OSError(98, "Address already in use"), PortHolder("http://localhost:8000", "box", 4, "nvml")
    assert server.judge_port("0.0.0.0:8000", taken, holder, is_client_only=False).status == "ok"
    assert server.judge_port("0.0.0.0:8000", taken, None, is_client_only=False).status == "problem"
    assert server.judge_port("0.0.0.0:8000", taken, None, is_client_only=True).status == "warning"


def test_whose_servers_have_the_gpus_of_this_machine() -> None:
    (finding,) = server.judge_authority({LockHolder(7, "bob", "http://localhost:8000"): [0, 2]})
    assert finding.message == "the server of bob (pid 7) grants these GPUs of this machine: 0, 2"
    assert finding.advice == "use that one: --endpoint http://localhost:8000"


def test_tokens_that_everybody_can_read_are_found(tmp_path: Path) -> None:
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
    with complaints() as heard:
        settings = ServerSettings.load()

    (problem,), (tokens,) = judge_settings("server", heard), server.check_tokens(settings, heard)

    assert ".env cannot be read" in problem.message
    assert "correct that file" in str(problem.advice)
    assert tokens.status == "skipped"


def test_one_bad_rule_of_the_hooks_file_is_a_problem_of_all_hooks(tmp_path: Path) -> None:
    file = tmp_path / "hooks.toml"
    file.write_text('[[hook]]\non = ["lost"]\nurl = "json://localhost"\n', encoding="utf-8")
    file.chmod(0o600)
    settings = ServerSettings(_env_file=None, gpu_pool_hooks_file=str(file))
    (fine,) = server.check_hooks(settings)
    file.write_text(file.read_text() + '[[hook]]\non = ["gone"]\nurl = "json://localhost"\n', encoding="utf-8")
    (bad,) = server.check_hooks(settings)

    assert (fine.status, bad.status) == ("ok", "problem")
    assert 'hook 2: on.0: "gone"' in bad.message


@pytest.mark.parametrize(
    ("environ", "given", "status", "words"),
    [
        ({}, None, "ok", "by login or default"),
        ({}, ["http://a"], "ok", "by --endpoint"),
        ({"GPU_SERVICE_ENDPOINT": "http://a"}, None, "ok", "by GPU_SERVICE_ENDPOINT"),
        ({"GPU_SERVICE_ENDPOINT": "http://a", "GPU_SERVICE_ENDPOINTS": "http://b"}, None, "warning", "is used"),
    ],
)
def test_which_variable_decides(environ: dict[str, str], given: list[str] | None, status: str, words: str) -> None:
    (finding,) = client.judge_variables(environ, given, ["http://a"])
    assert (finding.status, words in finding.message) == (status, True)


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        (statistics(gpus=1), "warning", "it has statistics only"),
        (not_found, "problem", "404"),
        (internal_error, "problem", "status 500"),
        (saying(401, b'{"detail": "Log in first."}'), "problem", "Log in first (status 401)"),
    ],
)
def test_what_an_endpoint_is(behaviour: Behaviour, status: str, words: str) -> None:
    with ForeignServer(behaviour) as foreign:
        (finding,) = client.check_endpoints(Servers([foreign.url]))

    assert (finding.status, words in finding.message) == (status, True), finding
    assert ("proxy that asks for a login" in str(finding.advice)) == ("401" in words)


def test_certificates_that_cannot_be_used_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_CA_FILE", "/nonexistent")
    (finding,) = client.check_endpoints(Servers(["https://box"]))
    assert (finding.status, "GPU_POOL_CA_FILE" in str(finding.advice)) == ("problem", True)
