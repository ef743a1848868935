"""What is read from `nvidia-smi`: a real executable that prints, hangs and fails as it is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic

import pytest

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId, Reading
from gpu_worker_pool.gpus.nvidia_smi import NvidiaSmiProbe
from gpu_worker_pool.gpus.probe import ProbeUnavailable
from gpu_worker_pool.host.processes import ProcessTable
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi, install
from tests.gpus.probe_contract import ProbeContract
from tests.processes import has_ended

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")
ROW_A = f"0, {A}, NVIDIA GeForce RTX 3080, 10240, 2048, 15, 45, 120.50, 320.00\n"
PATIENCE_S = 30.0
ROW_B = f"1, {B}, NVIDIA GeForce RTX 3080, 10240, 4096, 20, 50, 130.00, 320.00\n"
NAMES = ("memory_total_mb", "memory_used_mb", "utilization_percent", "temperature_c", "power_draw_w", "power_limit_w")
GOOD = ("10240", "2048", "15", "45", "120.50", "320.00")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidiaSmi:
    fake = install(tmp_path)
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    return fake


class TestNvidiaSmiProbeContract(ProbeContract):
    # What this one says does not change by itself, and each look is two processes.
    reads = 2

    @pytest.fixture
    def probe(self, smi: FakeNvidiaSmi) -> NvidiaSmiProbe:
        odd = f"7, {C}, Tesla K80, [N/A], 70, 101, [Not Supported], -3, 0\n"
        smi.say(ROW_B + ROW_A + odd, f"{A}, 4711, 1024, python\n{A}, 4711, 24, python\n{A}, 4712, [N/A], python\n")
        return NvidiaSmiProbe("box", timeout_s=PATIENCE_S)


def only(smi: FakeNvidiaSmi, gpus: str, processes: str = "") -> Reading:
    """The reading of the one GPU that is said to be there."""
    smi.say(gpus, processes)
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert result.error is None
    assert len(result.readings) == 1
    return result.readings[0]


def row(*numbers: str, name: str = "Tesla K80", uuid: str = A, index: str = "0") -> str:
    return f"{', '.join((index, uuid, name, *numbers))}\n"


# --- what it reads -------------------------------------------------------------------------------------------------


def test_it_reads_all_values(smi: FakeNvidiaSmi) -> None:
    smi.say(ROW_A + ROW_B)
    result = NvidiaSmiProbe("box", PATIENCE_S).read(7.0)
    assert result.error is None
    first, second = result.readings
    assert first.gpu.key == GpuKey("box", A)
    assert (first.gpu.index, first.gpu.name) == (0, "NVIDIA GeForce RTX 3080")
    assert [getattr(first, name) for name in NAMES] == [10240, 2048, 15, 45, 120.5, 320]
    assert (first.at, first.fault, first.processes) == (7.0, None, ())
    assert [getattr(second, name) for name in NAMES] == [10240, 4096, 20, 50, 130, 320]


def test_it_is_run_as_documented_and_in_plain_english(smi: FakeNvidiaSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    smi.say(ROW_A)
    NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert [run["arguments"] for run in smi.runs()] == [
        [
            "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,temperature.gpu,power.draw,power.limit",
            "--format=csv,noheader,nounits",
        ],
        ["--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"],
    ]
    assert [run["lc_all"] for run in smi.runs()] == ["C", "C"]


ODD = ["[N/A]", "[Unknown Error]", "", "ERR!", "nan", "1e3", "12 MiB", "٣", "9" * 30]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_value_is_unknown_and_it_alone(smi: FakeNvidiaSmi, odd: str) -> None:
    rows = [
        row(*GOOD[:position], odd, *GOOD[position + 1 :], index=str(position), uuid=f"GPU-{position}")
        for position in range(len(NAMES))
    ]
    smi.say("".join(rows))
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert result.error is None
    for position, reading in enumerate(result.readings):
        unknown = [name for name in NAMES if getattr(reading, name) is None]
        assert unknown == [NAMES[position]]
        assert reading.fault is None
    assert len(result.readings) == len(NAMES)


@pytest.mark.parametrize(
    ("numbers", "unknown"),
    [
        (("10240", "10241", "15", "45", "120.50", "320.00"), ["memory_used_mb"]),
        (("0", "2048", "15", "45", "120.50", "320.00"), ["memory_total_mb"]),
        (("10240", "2048", "101", "45", "120.50", "320.00"), ["utilization_percent"]),
        (("10240", "2048", "15", "45", "-1", "320.00"), ["power_draw_w"]),
        (("10240", "2048", "15", "45", "120.50", "0"), ["power_limit_w"]),
        (("10240", "0", "0", "-5", "0", "320.00"), []),
        (("10240", "10240", "100", "0", "320", "320.00"), []),
    ],
)
def test_a_value_that_cannot_be_is_unknown(smi: FakeNvidiaSmi, numbers: tuple[str, ...], unknown: list[str]) -> None:
    reading = only(smi, row(*numbers))
    assert [name for name in NAMES if getattr(reading, name) is None] == unknown


# --- GPUs in trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (("[GPU is lost]",) * 6, "GPU is lost"),
        (("[Unknown Error]",) * 6, "Unknown Error"),
        (("[N/A]", "[Unknown Error]", "[N/A]", "[N/A]", "[N/A]", "[N/A]"), "Unknown Error"),
        (("10240", "[GPU is lost]", "[GPU is lost]", "45", "1", "2"), "GPU is lost"),
    ],
)
def test_a_lost_gpu_is_a_reading_with_a_fault(smi: FakeNvidiaSmi, numbers: tuple[str, ...], says: str) -> None:
    smi.say(row(*numbers) + ROW_B)
    lost, fine = NvidiaSmiProbe("box", PATIENCE_S).read(1.0).readings
    assert lost.gpu.key.uuid == A
    assert lost.fault == f"nvidia-smi says: {says}"
    assert (lost.memory_used_mb, lost.utilization_percent, lost.processes) == (None, None, None)
    assert (fine.fault, fine.memory_used_mb, fine.processes) == (None, 4096, ())


def test_a_gpu_that_does_not_tell_its_uuid_any_more_is_known_by_its_index(smi: FakeNvidiaSmi) -> None:
    probe = NvidiaSmiProbe("box", PATIENCE_S)
    smi.say(ROW_A + ROW_B)
    before = probe.read(1.0).readings
    smi.say(ROW_A + row(*["[GPU is lost]"] * 6, index="1", uuid="[GPU is lost]", name="[GPU is lost]"))
    result = probe.read(2.0)
    assert [reading.gpu for reading in result.readings] == [reading.gpu for reading in before]
    assert result.readings[0].fault is None
    assert "no longer shows this GPU, and says: 1, [GPU is lost]" in str(result.readings[1].fault)


def test_a_gpu_that_vanishes_with_an_error_is_faulty_and_not_taken_out(smi: FakeNvidiaSmi) -> None:
    probe = NvidiaSmiProbe("box", PATIENCE_S)
    smi.say(ROW_A + ROW_B)
    probe.read(1.0)
    words = "Unable to determine the device handle for GPU 0000:0A:00.0: GPU is lost.  Reboot the system"
    smi.say({"print": f"{words}\n{ROW_B}", "exit_code": 15})
    result = probe.read(2.0)
    assert result.error == f"nvidia-smi: {words}"
    assert [(reading.gpu.key.uuid, reading.at) for reading in result.readings] == [(A, 2.0), (B, 2.0)]
    assert words in (result.readings[0].fault or "")
    assert result.readings[1].fault is None


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: infoROM is corrupted at gpu 0000:3B:00.0",
        row(*GOOD, index="x").strip(),
        row(*GOOD, index="5", uuid="").strip(),
        row(*GOOD[:-2], index="5", uuid=B).strip(),
        row(*GOOD, index="0", uuid=B).strip(),
        row(*GOOD, index="5", uuid=A).strip(),
    ],
)
def test_a_row_of_no_gpu_is_skipped_and_said(smi: FakeNvidiaSmi, line: str) -> None:
    smi.say(f"{ROW_A}{line}\n{row(*GOOD, index='9', uuid=C)}")
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert [reading.gpu.key.uuid for reading in result.readings] == [A, C]
    assert result.error == f"nvidia-smi printed a line that belongs to no GPU: {line.strip('[]')}"


# --- processes -----------------------------------------------------------------------------------------------------


def test_processes_are_those_of_the_gpu_with_what_the_system_knows_of_them(smi: FakeNvidiaSmi) -> None:
    me, table = os.getpid(), ProcessTable()
    smi.say(ROW_A + ROW_B, f"{B}, {me}, 1024, /usr/bin/python, really\n{B}, {os.getppid()}, [N/A], sh\n")
    first, second = NvidiaSmiProbe("box", PATIENCE_S).read(1.0).readings
    assert first.processes == ()
    assert second.processes is not None
    mine, parents = second.processes
    assert mine.id == ProcessId(me, table.started(me))
    assert mine.id.started is not None
    assert (mine.memory_mb, mine.name, mine.ancestors) == (1024, table.name(me), table.ancestors(me))
    assert (parents.id.pid, parents.memory_mb) == (os.getppid(), None)


@pytest.mark.parametrize(
    ("amounts", "together"), [(("10", "20", "30"), 60.0), (("10", "[N/A]", "30"), None), (("[N/A]", "10", "30"), None)]
)
def test_a_process_named_often_is_one_with_all_its_memory(
    smi: FakeNvidiaSmi, amounts: tuple[str, ...], together: float | None
) -> None:
    reading = only(smi, ROW_A, "".join(f"{A}, 999999999, {amount}, python\n" for amount in amounts))
    assert [process.memory_mb for process in reading.processes or ()] == [together]


@pytest.mark.parametrize("pid", ["[N/A]", "", "0", "-1", "x", "9" * 12])
def test_a_process_without_a_pid_makes_those_of_its_gpu_unknown(smi: FakeNvidiaSmi, pid: str) -> None:
    smi.say(ROW_A + ROW_B, f"{A}, 999999999, 7, python\n{A}, {pid}, 7, python\n{B}, 999999998, 7, python\n")
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert result.readings[0].processes is None
    assert [process.id.pid for process in result.readings[1].processes or ()] == [999999998]


@pytest.mark.parametrize("line", ["GPU-other, 1, 2, python", "hello", "[N/A], 1, 2, python", f"{A}, 1"])
def test_a_process_of_no_gpu_is_skipped_and_said(smi: FakeNvidiaSmi, line: str) -> None:
    smi.say(ROW_A, f"{line}\n{A}, 999999999, 7, python\n")
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert [process.id.pid for process in result.readings[0].processes or ()] == [999999999]
    assert result.error == f"nvidia-smi printed a line that belongs to no process: {line.strip('[]')}"


def test_a_list_of_processes_that_hangs_is_stopped_and_all_else_is_read(smi: FakeNvidiaSmi) -> None:
    smi.say(ROW_A, {"hang": True})
    result = NvidiaSmiProbe("box", timeout_s=2.0).read(1.0)
    assert result.error is None
    assert [(reading.memory_used_mb, reading.processes) for reading in result.readings] == [(2048, None)]
    assert has_ended(smi.runs()[-1]["pid"])


# --- no answer -----------------------------------------------------------------------------------------------------


DRIVER_GONE = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"print": f"{DRIVER_GONE}\nsecond line\n", "exit_code": 9}, f"nvidia-smi: {DRIVER_GONE}"),
        ({"print": "No devices were found\n", "exit_code": 6}, "nvidia-smi: No devices were found"),
        ({"print": "No devices were found\n", "exit_code": 0}, "nvidia-smi: No devices were found"),
        ({"print_error": "\nFailed to initialize NVML\n", "exit_code": 255}, "nvidia-smi: Failed to initialize NVML"),
        ({"exit_code": 3}, "nvidia-smi failed with exit code 3 and printed nothing"),
        ({"print": "\n \n"}, "nvidia-smi shows no GPU"),
        ({"print": "x" * 5000, "exit_code": 1}, f"nvidia-smi: {'x' * 200}…"),
    ],
)
def test_a_failure_is_an_error_in_its_own_words(smi: FakeNvidiaSmi, answer: dict[str, object], error: str) -> None:
    smi.say(answer)
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert (result.readings, result.error) == ((), error)
    assert len(smi.runs()) == 1  # without a GPU there is nothing to ask about processes


@pytest.mark.parametrize(("hangs", "child"), [(True, None), (True, "holds the pipe"), (False, "holds the pipe")])
def test_one_that_hangs_is_killed_with_all_it_started(smi: FakeNvidiaSmi, hangs: bool, child: str | None) -> None:
    smi.say({"print": ROW_A, "hang": hangs} | ({"child": child} if child else {}))
    started = monotonic()
    result = NvidiaSmiProbe("box", timeout_s=2.0).read(1.0)
    assert monotonic() - started < 20.0
    assert (result.readings, result.error) == ((), "nvidia-smi did not answer within 2 s and was stopped")
    (run,) = smi.runs()
    with pytest.raises(ProcessLookupError):  # not even a zombie: it was waited for
        os.kill(run["pid"], 0)
    assert child is None or has_ended(run["child_pid"])


def test_one_that_cannot_be_killed_is_not_run_again_until_it_is_gone(smi: FakeNvidiaSmi) -> None:
    smi.say({"hang": True, "child": "clings"})
    probe = NvidiaSmiProbe("box", timeout_s=2.0)
    first = probe.read(1.0)
    if "cannot trace" in (first.error or ""):
        pytest.skip(f"this machine does not allow it: {first.error}")
    (run,) = smi.runs()
    try:
        assert f"(pid {run['pid']}) did not answer and cannot be killed" in (first.error or "")
        smi.say(ROW_A)
        assert probe.read(2.0) == first
        assert len(smi.runs()) == 1
    finally:
        os.kill(run["child_pid"], signal.SIGKILL)
    assert has_ended(run["child_pid"])
    os.waitid(os.P_PID, run["pid"], os.WEXITED | os.WNOWAIT)
    assert [reading.memory_used_mb for reading in probe.read(3.0).readings] == [2048]


# --- cannot be used ------------------------------------------------------------------------------------------------


def test_without_nvidia_smi_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ProbeUnavailable, match="nvidia-smi was not found on the PATH, or this user may not run it: install"
    ):
        NvidiaSmiProbe("box")


@pytest.mark.parametrize(
    ("content", "why"), [("#!/no/such/interpreter\n", "No such file"), ("no program", "Exec format")]
)
def test_one_that_cannot_be_run_is_an_error_and_no_exception(smi: FakeNvidiaSmi, content: str, why: str) -> None:
    smi.command.write_text(content)
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert result.readings == ()
    assert (result.error or "").startswith(f"nvidia-smi could not be run: {why}")
