"""What `gpu-pool doctor` thinks of made-up facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.cli.doctor import client, machine, server
from gpu_worker_pool.cli.doctor.command import complaints, judge_settings
from gpu_worker_pool.cli.doctor.machine import Probed
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.server.settings import ServerSettings
from tests.client.foreign_servers import Behaviour, ForeignServer, internal_error, not_found, saying, statistics


def reading(index: int, fault: str | None = None, uuid: str | None = None) -> Reading:
    return Reading(Gpu(GpuKey("box", uuid or f"GPU-{index}"), index, "A100"), 0.0, fault=fault)


LOADED = "550.54.14"
WORKS = Probed((reading(0), reading(1)), "nvml", took_s=0.1)


@pytest.mark.parametrize(
    ("driver", "probed", "status", "words"),
    [
        (LOADED, WORKS, "ok", "2 GPUs: A100 (by nvml, driver 550.54.14), read in 100 ms"),
        (None, WORKS, "ok", "(by nvml)"),  # WSL: the driver is Windows'
        (LOADED, Probed((reading(0),), "nvidia-smi"), "warning", "by nvidia-smi"),
        (LOADED, Probed((reading(0), reading(1, fault="it is lost")), "nvml"), "problem", "GPU 1: it is lost"),
        (LOADED, Probed(), "problem", "it shows no GPU"),
        (LOADED, Probed(error="it has not answered for 20 s"), "problem", "not answered"),
        (None, Probed(error="it was not found: install it"), "warning", "no driver of NVIDIA or AMD is loaded"),
    ],
)
def test_what_the_driver_and_the_probe_come_to(driver: str | None, probed: Probed, status: str, words: str) -> None:
    (finding,) = machine.judge_gpus(driver, probed)
    assert (finding.status, words in finding.message) == (status, True), finding
    assert finding.advice or status == "ok"


def test_the_driver_is_found_by_what_the_system_shows(tmp_path: Path) -> None:
    assert machine.driver_version(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu\n"
    )
    assert machine.driver_version(tmp_path) == "550.54.14"


def test_tokens_that_everybody_can_read_are_found(tmp_path: Path) -> None:
    # The folders of pytest are for one user only, so that the mode of a file in them does not matter.
    (tmp_path / "tokens").touch(0o644)
    assert not server.can_everybody_read(tmp_path / "tokens")
    assert server.can_everybody_read(Path("/etc/passwd"))


def test_a_settings_file_that_cannot_be_read_is_a_problem_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00bad")
    monkeypatch.chdir(tmp_path)
    with complaints() as heard:
        ServerSettings.load()
    (problem,) = judge_settings("server", heard)
    assert ".env cannot be read" in problem.message
    assert "correct that file" in str(problem.advice)


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
        (finding,) = Servers([foreign.url]).run(client.check_endpoints)

    assert (finding.status, words in finding.message) == (status, True), finding
    assert ("proxy that asks for a login" in str(finding.advice)) == ("401" in words)
