"""The measurements themselves run on this tree and give what they say; a part that hangs or fails is ended and told."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import NotMeasuredError, run
from benchmarks.beside.__main__ import MEASURES, Measure
from benchmarks.contenders.__main__ import FIELD, Pair
from benchmarks.contenders.contender import serving
from benchmarks.figures import ROOT, Results
from benchmarks.next_command import gaps_s, next_command_s
from benchmarks.processes import Child
from benchmarks.sweep import jobs_a_second
from benchmarks.targets import BY_ID
from tests.preloaded import run_preloaded
from tests.processes import has_ended

AGENT = ROOT / "benchmarks" / "beside"


def agent_of(measure: Measure) -> tuple[str, ...]:
    """The agent of a measure, with a small pool."""
    script, *arguments = measure.agent
    return (script, "8", "8") if script == "decisions" else (script, *arguments)


def test_each_measure_beside_the_base_runs_on_this_tree() -> None:
    for words in dict.fromkeys(map(agent_of, MEASURES)):
        with Child([sys.executable, "-P", AGENT / f"{words[0]}.py", *words[1:]]) as agent:
            assert agent.hear() == "ready"
            for measure in MEASURES:
                if agent_of(measure) == words:
                    name, *often = measure.order
                    few = [2 if isinstance(each, int) else each for each in often]
                    # A difference of two times may be anything on a busy machine.
                    assert agent.ask(name, *few) > 0 or measure.id == "import"
                    assert measure.id in BY_ID


def test_an_agent_tells_what_failed_and_goes_on() -> None:
    with Child([sys.executable, "-P", AGENT / "agent.py", "full", "1"]) as agent:
        agent.hear()
        with pytest.raises(RuntimeError, match=r"command: Command .* returned non-zero exit status 3"):
            agent.ask("command", "-c", "raise SystemExit(3)")
        assert agent.ask("memory") > 1


def test_the_gap_is_from_the_end_of_a_command_to_the_beginning_of_the_next() -> None:
    assert gaps_s([(5.0, 6.0), (1.0, 2.0), (2.5, 4.0)]) == [0.5, 1.0]
    with pytest.raises(RuntimeError, match="two commands have run at once"):
        gaps_s([(1.0, 3.0), (2.0, 4.0)])


def test_gpus_pass_on_between_processes_and_commands_run_in_order(tmp_path: Path) -> None:
    """Ours, as each contender: release, kill -9, cycles, the next command, and a sweep by both commands."""
    with serving("pool", tmp_path / "pool", 1) as served, ExitStack() as held:
        pair = Pair(FIELD["ours"], served, held)
        assert pair.hand_over(2) > 0
        assert pair.killed(1) > 0
        assert pair.cycle(2) > 0
        held.close()
        assert served.queue is not None
        assert next_command_s(served.queue, tmp_path / "probe", 2) > 0
        assert jobs_a_second(served.queue.run_all, ["true"], 3) > 0
        assert jobs_a_second(served.queue.run_array, ["true"], 3) > 0  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="has failed with exit code 1"):
            served.queue.run_all([["false"]])


def test_a_contender_that_is_not_installed_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "PLACES", "")
    monkeypatch.setenv("PATH", str(tmp_path))

    for name, why in (
        ("hyperqueue", "hyperqueue is not in .bench-venv: python -m benchmarks.peers installs it"),
        ("ray", "ray is not in .bench-venv"),
        ("dask", "distributed is not in .bench-venv"),
        ("slurm", "munged is not installed: on Debian, apt-get install slurm-wlm"),
        ("task_spooler", "tsp is not installed: on Debian, apt-get install task-spooler"),
    ):
        with pytest.raises(peers.MissingError, match=why), serving(name, tmp_path / name, 1):
            pass


def test_a_quick_run_of_a_part_writes_its_figures(tmp_path: Path) -> None:
    data = tmp_path / "results.json"

    done = run_preloaded([sys.executable, "-m", "benchmarks.serving", "--quick", "--json", data], cwd=ROOT)

    assert done.returncode == 0, done.stderr
    found = json.loads(data.read_text(encoding="utf-8"))
    assert Results(**found).part == "serving"
    assert found["figures"]["summary_bare"]["ratio"] > 0


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "child.wait()\n",
        encoding="utf-8",
    )

    with pytest.raises(NotMeasuredError, match="longer than 2 s"):
        run([sys.executable, str(script)], 2.0)

    assert has_ended(int((tmp_path / "pid").read_text(encoding="ascii")), within_s=10.0)
