"""What `gpu-pool doctor` thinks of the GPUs of this machine, from made-up facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.cli.doctor import gpus
from gpu_worker_pool.cli.doctor.gpus import NvidiaDriver, Probed
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading


def reading(index: int, name: str = "A100", fault: str | None = None) -> Reading:
    return Reading(Gpu(GpuKey("box", f"GPU-{index}"), index, name), 0.0, fault=fault)


LOADED = NvidiaDriver("550.54.14", ("nvidia0", "nvidia1"))
NO_DRIVER = NvidiaDriver(None, ())
WORKS = Probed((reading(0), reading(1)), took_s=0.1)
MISSING = Probed(unavailable="it was not found: install it")
HANGS = Probed(error="it has not answered for 20 s")


@pytest.mark.parametrize(
    ("driver", "nvml", "smi", "expected"),
    [
        (NO_DRIVER, MISSING, MISSING, ("warning", "skipped", "skipped")),
        (LOADED, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, WORKS, MISSING, ("ok", "ok", "ok")),
        (LOADED, MISSING, WORKS, ("ok", "warning", "ok")),
        (LOADED, MISSING, MISSING, ("ok", "problem", "problem")),
        (LOADED, HANGS, HANGS, ("ok", "problem", "problem")),
        (LOADED, Probed(), Probed(), ("ok", "problem", "problem")),
        # A container that was not given the GPUs of its machine.
        (NvidiaDriver("550.54.14", ()), MISSING, MISSING, ("problem", "problem", "problem")),
        # WSL: the driver is Windows'.
        (NO_DRIVER, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, Probed((reading(0), reading(1, fault="it is lost"))), WORKS, ("ok", "problem", "ok")),
        (LOADED, WORKS, Probed((reading(0),)), ("ok", "ok", "warning")),
        (LOADED, WORKS, replace(WORKS, took_s=3.0), ("ok", "ok", "warning")),
    ],
)
def test_what_the_driver_nvml_and_nvidia_smi_come_to(
    driver: NvidiaDriver, nvml: Probed, smi: Probed, expected: tuple[str, str, str]
) -> None:
    judges = (gpus.judge_driver, gpus.judge_nvml, gpus.judge_nvidia_smi)
    found = [judge(driver, nvml, smi) for judge in judges]

    assert tuple(finding.status for finding in found) == expected
    assert all(finding.advice for finding in found if finding.status in {"warning", "problem"})


def test_a_machine_without_a_gpu_is_told_how_to_try_it_all_the_same() -> None:
    finding = gpus.judge_driver(NO_DRIVER, MISSING, MISSING)

    assert "SIMULATED_GPUS=4" in str(finding.advice)


def test_mig_devices_are_not_taken_for_a_disagreement() -> None:
    mig = Probed((Reading(Gpu(GpuKey("box", "MIG-1"), 100, "A100 MIG"), 0.0),))

    assert gpus.judge_nvidia_smi(LOADED, mig, WORKS).status == "ok"


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, "ok", "all GPUs are shown"),
        ("1", "ok", "these are shown: 1"),
        ("-1", "warning", "hides all"),
        ("", "warning", "hides all"),
        ("0,7", "warning", "GPU 7 in CUDA_VISIBLE_DEVICES not found"),
        ("first", "warning", "neither a GPU index nor a GPU UUID"),
    ],
)
def test_visible_devices_as_they_would_be_understood(value: str | None, status: str, words: str) -> None:
    finding = gpus.judge_visible_devices(value, WORKS.readings)

    assert finding.status == status
    assert words in finding.message


def test_the_order_of_devices_matters_where_the_models_differ() -> None:
    mixed = (reading(0), reading(1, "T4"))

    assert gpus.judge_device_order(None, WORKS.readings).status == "ok"
    assert gpus.judge_device_order(None, mixed).status == "warning"
    assert gpus.judge_device_order("PCI_BUS_ID", mixed).status == "ok"
    assert gpus.judge_device_order("PCI", WORKS.readings).status == "warning"


def test_the_driver_is_found_by_what_the_system_shows(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.2.0\n"
    )
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()

    assert NvidiaDriver.here(tmp_path) == LOADED
