"""An `nvidia-smi` that fails, hangs, prints without end, or cannot be run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic

import pytest

from gpu_worker_pool.gpus.nvidia_smi import NvidiaSmiProbe
from gpu_worker_pool.gpus.probe import ProbeUnavailable
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi
from tests.gpus.nvidia_smi.rows import PATIENCE_S, ROW_A
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
