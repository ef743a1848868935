"""AMD GPUs, as the files of the kernel show them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gpu_worker_pool.cli.doctor.machine import judge_amd
from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.gpus.amd import AmdProbe
from gpu_worker_pool.gpus.choose import MixedProbe
from gpu_worker_pool.gpus.grant_env import FIRST_OF_MIXED, GrantedGpu, grant_env
from gpu_worker_pool.gpus.probe import Probe, ProbeResult, ProbeUnavailable
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from tests.enforce.box import make_box
from tests.other_user import ALICE, python_as

from .amd_tree import GB, RX7900, AmdTree
from .probe_contract import ProbeContract

UUID = "GPU-5afd2ff3c7a4c1d8"
NVIDIA = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.fixture
def tree(tmp_path: Path) -> AmdTree:
    return AmdTree(tmp_path)


def read(tree: AmdTree) -> tuple[Reading, ...]:
    return AmdProbe("box", root=tree.root).read(1.0).readings


class TestContract(ProbeContract):
    @pytest.fixture
    def probe(self, tree: AmdTree) -> Probe:
        tree.add_card(3)
        tree.add_card(0x83, unique_id=0xC0FFEE, model=RX7900, vram=24 * GB)
        tree.add_process(4711, computes={tree.add_card(0xC3, unique_id=7): GB})
        return AmdProbe("box", root=tree.root)


def test_all_that_the_driver_says(tree: AmdTree) -> None:
    tree.add_card(3)
    (reading,) = read(tree)
    assert (reading.gpu.key.uuid, reading.gpu.index, reading.gpu.name) == (UUID, 0, "AMD Instinct MI300X OAM")
    assert (reading.memory_total_mb, reading.memory_used_mb, reading.utilization_percent) == (192 * 1024, 512, 7)
    assert (reading.temperature_c, reading.power_draw_w, reading.power_limit_w) == (41, 140, 750)
    assert (reading.processes, reading.fault) == ((), None)


def test_a_card_without_a_product_name_has_that_of_libdrms_list_and_newer_drivers_have_other_files(
    tree: AmdTree,
) -> None:
    card = tree.add_card(3, model=RX7900)
    card.set_sensors(power1_average=None, power1_input=90_000_000, temp1_label="mem")
    (reading,) = read(tree)
    assert (reading.gpu.name, reading.power_draw_w, reading.temperature_c) == ("AMD Radeon RX 7900 XTX", 90, 47)
    card.set(device="0x0000")
    assert read(tree)[0].gpu.name == "AMD GPU"


def test_an_integrated_gpu_is_not_handed_out_and_the_others_keep_the_numbers_that_rocm_gives_them(
    tree: AmdTree,
) -> None:
    tree.add_card(3, vram=GB // 2, unique_id=None)
    with pytest.raises(ProbeUnavailable, match="no memory of its own"):
        AmdProbe("box", root=tree.root)
    tree.add_card(0x83)
    assert [(reading.gpu.index, reading.gpu.key.uuid) for reading in read(tree)] == [(1, UUID)]


def test_a_machine_without_an_amd_gpu_says_so(tree: AmdTree) -> None:
    tree.add_card(3, vendor="0x8086")
    with pytest.raises(ProbeUnavailable, match="no AMD GPU has the amdgpu driver"):
        AmdProbe("box", root=tree.root)


def test_a_gpu_without_a_unique_id_is_known_by_its_place(tree: AmdTree) -> None:
    tree.add_card(3, unique_id=None)
    assert read(tree)[0].gpu.key.uuid == "GPU-pci-0000-03-00.0"


def test_a_unique_id_that_cannot_be_read_now_does_not_make_another_gpu_of_it(tmp_path: Path) -> None:
    """Known by its place it would be granted, while a lease of before a restart has it by its unique id."""
    tree = AmdTree(tmp_path, has_kfd=False)
    card = tree.add_card(3)
    card.refuse("unique_id")
    with pytest.raises(ProbeUnavailable, match="does not say which GPU it has"):
        AmdProbe("box", root=tree.root)
    tree.add_card(4, unique_id=4)
    probe = AmdProbe("box", root=tree.root)
    assert [reading.gpu.key.uuid for reading in probe.read(1.0).readings] == ["GPU-0000000000000004"]
    (card.folder / "unique_id").rmdir()
    card.set(unique_id=UUID.removeprefix("GPU-"))
    assert {reading.gpu.key.uuid for reading in probe.read(2.0).readings} == {"GPU-0000000000000004", UUID}


def test_the_unique_id_may_be_known_to_kfd_alone(tree: AmdTree) -> None:
    tree.add_card(3).set(unique_id=None)
    assert read(tree)[0].gpu.key.uuid == UUID


@pytest.mark.parametrize(
    ("file", "content", "unknown"),
    [
        ("mem_info_vram_used", None, "memory_used_mb"),
        ("mem_info_vram_used", 400 * GB, "memory_used_mb"),
        ("mem_info_vram_total", "", "memory_total_mb"),
        ("gpu_busy_percent", None, "utilization_percent"),
        ("gpu_busy_percent", "65535", "utilization_percent"),
        ("gpu_busy_percent", "N/A", "utilization_percent"),
    ],
)
def test_what_a_file_does_not_say_is_unknown_and_not_zero(
    tree: AmdTree, file: str, content: str | int | None, unknown: str
) -> None:
    card = tree.add_card(3)
    probe = AmdProbe("box", root=tree.root)
    card.set(**{file: content})
    (reading,) = probe.read(1.0).readings
    assert getattr(reading, unknown) is None
    assert reading.fault is None


def test_sensors_that_are_hidden_are_unknown(tree: AmdTree) -> None:
    tree.add_card(3).set_sensors(
        temp1_input=None, temp2_input=None, temp1_label=None, temp2_label=None, power1_average=None, power1_cap=None
    )
    (reading,) = read(tree)
    assert (reading.temperature_c, reading.power_draw_w, reading.power_limit_w) == (None, None, None)


def test_a_gpu_that_is_reset_or_gone_has_a_fault_and_keeps_its_identity(tree: AmdTree) -> None:
    resets, goes = tree.add_card(3), tree.add_card(4, unique_id=4)
    probe = AmdProbe("box", root=tree.root)
    before = [reading.gpu for reading in probe.read(1.0).readings]
    resets.refuse("mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent")
    one, other = probe.read(2.0).readings
    assert ("is being reset" in str(one.fault), other.fault) == (True, None)

    tree.remove(goes)
    result = probe.read(3.0)
    assert [reading.gpu for reading in result.readings] == before
    assert "it has gone" in str(result.readings[1].fault)
    assert "no AMD GPU answers" in str(result.error)


def test_an_integrated_gpu_whose_memory_is_not_known_at_first_is_not_handed_out_later(tree: AmdTree) -> None:
    integrated = tree.add_card(3, vram=GB // 2, unique_id=3)
    integrated.set(mem_info_vram_total=None)
    with pytest.raises(ProbeUnavailable, match="does not say how much memory"):
        AmdProbe("box", root=tree.root)
    tree.add_card(4)
    probe = AmdProbe("box", root=tree.root)
    integrated.set(mem_info_vram_total=GB // 2)
    assert [reading.gpu.key.uuid for reading in probe.read(1.0).readings] == [UUID]


def test_no_two_gpus_have_the_same_index_where_rocm_knows_only_some(tree: AmdTree) -> None:
    tree.has_kfd = False
    tree.add_card(3, unique_id=3)
    tree.has_kfd = True
    tree.add_card(4, unique_id=4)
    # The number of ROCm stays with the GPU that has it.
    assert {reading.gpu.key.uuid[-1]: reading.gpu.index for reading in read(tree)} == {"4": 0, "3": 1}
    probe = AmdProbe("box", root=tree.root)
    tree.add_card(1, unique_id=1)
    assert sorted(reading.gpu.index for reading in probe.read(1.0).readings) == [0, 1, 2]


def test_a_gpu_that_is_split_into_parts_is_not_granted_and_says_why(tree: AmdTree) -> None:
    tree.add_partitions(tree.add_card(3), 7)
    (reading,) = read(tree)
    assert "split into 8 parts" in str(reading.fault)


# --- processes -------------------------------------------------------------------------------------------------------


DRAWS = "pos:\t0\ndrm-driver:\tamdgpu\ndrm-client-id:\t12\ndrm-pdev:\t0000:03:00.0\n{memory}drm-engine-gfx:\t98 ns\n"


def test_processes_that_compute_and_that_draw_are_found_with_their_memory(tree: AmdTree) -> None:
    first, second = tree.add_card(3), tree.add_card(4, unique_id=4)
    tree.add_process(10, computes={first: 3 * GB, second: 0})
    tree.add_process(11, draws=DRAWS.format(memory="drm-memory-vram:\t2048 KiB\n"))
    tree.add_process(12, draws=DRAWS.format(memory="drm-resident-vram:\t5 MiB\n"))
    tree.add_process(13, draws=DRAWS.format(memory=""))  # an older kernel
    tree.add_process(14, computes={first: GB}, draws=DRAWS.format(memory="drm-memory-vram:\t2097152 KiB\n"))
    one, other = read(tree)
    assert one.processes is not None
    assert {process.id: process.memory_mb for process in one.processes} == {
        ProcessId(10, 1010.0): 3072,
        ProcessId(11, 1011.0): 2,
        ProcessId(12, 1012.0): 5,
        ProcessId(14, 1014.0): 2048,
    }
    assert {process.name for process in one.processes} == {"python"}
    assert other.processes == ()


def test_a_process_whose_memory_cannot_be_read_makes_those_of_its_gpu_unknown(tree: AmdTree) -> None:
    first, second = tree.add_card(3), tree.add_card(4, unique_id=4)
    tree.add_process(10, computes={first: GB, second: GB})
    file = tree.root / f"sys/class/kfd/kfd/proc/10/vram_{first.kfd_id}"
    file.unlink()
    file.mkdir()  # EISDIR in place of EIO
    one, other = read(tree)
    assert one.processes is None
    assert [process.id.pid for process in other.processes or ()] == [10]


READS = "import sys; from pathlib import Path; from gpu_worker_pool.gpus.amd import AmdProbe; print(AmdProbe('box', root=Path(sys.argv[1])).read(1.0).readings[0].processes)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_without_kfd_only_root_knows_all_processes() -> None:
    with make_box() as box:
        tree = AmdTree(box.root, has_kfd=False)
        tree.add_card(3)
        tree.add_process(11, draws=DRAWS.format(memory="drm-memory-vram:\t2048 KiB\n"))
        (process,) = read(tree)[0].processes or ()
        assert process.id.pid == 11
        command = python_as(ALICE, "-c", READS, str(box.root))
        assert subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout == "None\n"


# --- boxes with GPUs of two vendors, and what a grant sets --------------------------------------------------------------


class Failing(SimulatedProbe):
    """A driver that can go away."""

    is_away = False

    def read(self, at: float):  # type: ignore[no-untyped-def]

        return ProbeResult((), "it is away") if self.is_away else super().read(at)


def test_a_box_with_gpus_of_two_vendors_shows_all_of_them(tree: AmdTree) -> None:
    tree.add_card(3)
    nvidia = Failing("box", "2xA100-80GB")
    probe = MixedProbe(nvidia, AmdProbe("box", first_index=FIRST_OF_MIXED, root=tree.root))
    assert probe.source == "simulated+amdgpu"
    assert [reading.gpu.index for reading in probe.read(1.0).readings] == [0, 1, FIRST_OF_MIXED]

    nvidia.is_away = True
    result = probe.read(2.0)
    # Those of the driver that is away grow old.
    assert [(reading.gpu.index, reading.at) for reading in result.readings] == [(0, 1.0), (1, 1.0), (64, 2.0)]
    assert result.error == "it is away"


AMD_2, BY_PLACE = "GPU-00000000000000aa", "GPU-pci-0000-03-00.0"


@pytest.mark.parametrize(
    ("gpus", "cuda", "rocm"),
    [
        ([(1, NVIDIA), (0, NVIDIA)], "0,1", None),
        ([(0, UUID)], UUID, (UUID, "0")),
        ([(65, UUID), (64, AMD_2)], f"{AMD_2},{UUID}", (f"{AMD_2},{UUID}", "0,1")),
        # ROCm knows a GPU without a unique id by its position only.
        ([(65, BY_PLACE)], BY_PLACE, ("1", "0")),
        ([(0, NVIDIA), (64, UUID)], f"{NVIDIA},{UUID}", (UUID, "0")),
    ],
)
def test_a_grant_shows_its_gpus_to_cuda_and_to_rocm(
    gpus: list[tuple[int, str]], cuda: str, rocm: tuple[str, str] | None
) -> None:
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cuda}
    if rocm is not None:
        env |= {"ROCR_VISIBLE_DEVICES": rocm[0], "HIP_VISIBLE_DEVICES": rocm[1]}
    assert grant_env([GrantedGpu(index, uuid) for index, uuid in gpus]) == env


# --- doctor, beside amd-smi ------------------------------------------------------------------------------------------------


ROCM_6 = [{"gpu": 0, "bdf": "0000:03:00.0", "uuid": "a4ff740f-0000-1000-80ea-e05c945bb3b2", "kfd_id": 51003}]
ROCM_7 = {"gpu_data": ROCM_6}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (ROCM_6, "ok", "it shows the same 1 GPU"),
        (ROCM_7, "ok", "it shows the same 1 GPU"),
        ([*ROCM_6, {"gpu": 1, "bdf": "0000:0E:00.0"}], "ok", "it also shows 0000:0e:00.0: a part of the processor"),
        ([], "warning", "it does not show 0000:03:00.0"),
        ("what", "warning", "it does not show 0000:03:00.0"),
    ],
)
def test_doctor_compares_with_amd_smi(
    tree: AmdTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object, status: str, words: str
) -> None:
    tree.add_card(3)
    program = tmp_path / "bin/amd-smi"
    program.parent.mkdir()
    said = answer if isinstance(answer, str) else json.dumps(answer)
    program.write_text(f"#!/bin/sh\ntest \"$*\" = 'list --json' && echo '{said}'\n", encoding="ascii")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (smi,) = judge_amd(tree.root)
    assert (smi.check, smi.status) == ("amd-smi", status)
    assert words in smi.message
