"""An `nvidia-smi` that fails, hangs, prints without end, or cannot be run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest

from gpu_worker_pool.gpus.nvidia_smi import NvidiaSmiProbe
from gpu_worker_pool.gpus.probe import ProbeUnavailable
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi
from tests.gpus.nvidia_smi.rows import PATIENCE_S, ROW_A
from tests.other_user import ALICE, python_as
from tests.processes import has_ended

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


def test_what_was_read_before_a_failure_is_kept(smi: FakeNvidiaSmi) -> None:
    smi.say({"print": ROW_A, "exit_code": 14})
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert [reading.memory_used_mb for reading in result.readings] == [2048]
    assert result.error == "nvidia-smi failed with exit code 14 and printed nothing"


def test_warnings_on_the_error_output_do_not_disturb(smi: FakeNvidiaSmi) -> None:
    smi.say({"print": ROW_A, "print_error": "a warning\n"})
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert (len(result.readings), result.error) == (1, None)


def test_it_works_again_when_the_driver_does(smi: FakeNvidiaSmi) -> None:
    probe = NvidiaSmiProbe("box", timeout_s=2.0)
    for trouble in ({"exit_code": 9}, {"hang": True}):
        smi.say(trouble)
        assert probe.read(1.0).error
    smi.say(ROW_A)
    result = probe.read(2.0)
    assert (len(result.readings), result.error) == (1, None)


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


def test_a_child_that_escapes_with_the_pipe_does_not_hold_up_the_look(smi: FakeNvidiaSmi) -> None:
    smi.say({"hang": True, "child": "escapes"})
    started = monotonic()
    result = NvidiaSmiProbe("box", timeout_s=2.0).read(1.0)
    (run,) = smi.runs()
    os.kill(run["child_pid"], signal.SIGKILL)
    assert monotonic() - started < 20.0
    assert result.error == "nvidia-smi did not answer within 2 s and was stopped"


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


@pytest.mark.parametrize("exit_code", [0, 1])
def test_one_that_prints_without_end_is_stopped(smi: FakeNvidiaSmi, exit_code: int) -> None:
    smi.say({"print_endlessly": True, "exit_code": exit_code})
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert (result.readings, result.error) == ((), "nvidia-smi printed more than 1024 KiB and was stopped")
    assert has_ended(smi.runs()[0]["pid"])


def test_no_descriptor_is_left_open(smi: FakeNvidiaSmi) -> None:
    probe = NvidiaSmiProbe("box", timeout_s=2.0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for answer in (ROW_A, {"hang": True}, {"print_endlessly": True}, {"exit_code": 1}):
        smi.say(answer)
        probe.read(1.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- cannot be used ------------------------------------------------------------------------------------------------


def test_without_nvidia_smi_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeUnavailable, match="nvidia-smi was not found on the PATH: install the NVIDIA driver"):
        NvidiaSmiProbe("box")


def test_a_folder_on_the_path_that_the_user_may_not_enter_is_passed_over() -> None:
    code = "from gpu_worker_pool.gpus.choose import choose_probe\nchoose_probe('box', None)"
    with TemporaryDirectory(prefix="gpu-pool-") as locked:
        env = {**os.environ, "PATH": locked, "LD_LIBRARY_PATH": ""}
        command = python_as(ALICE, "-c", code)
        tried = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")
    assert "ProbeUnavailable" in tried.stderr
    assert "nvidia-smi was not found on the PATH" in tried.stderr


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProbeUnavailable, match=r"/elsewhere/nvidia-smi was not found: install"):
        NvidiaSmiProbe("box", command=str(tmp_path / "elsewhere" / "nvidia-smi"))


@pytest.mark.parametrize("by_path", [True, False])
def test_one_that_may_not_be_executed_is_said_so(
    smi: FakeNvidiaSmi, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    monkeypatch.setenv("PATH", f"/nowhere:{smi.folder}")
    smi.command.chmod(0o644)
    with pytest.raises(ProbeUnavailable, match=f"{smi.command} may not be executed by this user: permission denied"):
        NvidiaSmiProbe("box", command=str(smi.command) if by_path else "nvidia-smi")


def test_one_by_its_path_needs_no_path_variable(smi: FakeNvidiaSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    smi.say(ROW_A)
    assert len(NvidiaSmiProbe("box", PATIENCE_S, str(smi.command)).read(1.0).readings) == 1


@pytest.mark.parametrize(
    ("content", "why"), [("#!/no/such/interpreter\n", "No such file"), ("no program", "Exec format")]
)
def test_one_that_cannot_be_run_is_an_error_and_no_exception(smi: FakeNvidiaSmi, content: str, why: str) -> None:
    smi.command.write_text(content)
    result = NvidiaSmiProbe("box", PATIENCE_S).read(1.0)
    assert result.readings == ()
    assert (result.error or "").startswith(f"nvidia-smi could not be run: {why}")


def test_one_that_was_removed_since_is_an_error_and_no_exception(smi: FakeNvidiaSmi) -> None:
    probe = NvidiaSmiProbe("box", PATIENCE_S)
    smi.command.unlink()
    assert probe.read(1.0).error == f"nvidia-smi could not be run: No such file or directory ({smi.command})"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(smi: FakeNvidiaSmi, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s is"):
        NvidiaSmiProbe("box", timeout_s)
