"""How this tree compares with an earlier commit of it: both are installed, take turns, and are measured in one run.

    python -m benchmarks.beside [--commit cbb8954b] [--rounds 15] [--only hand_over]

The earlier commit is taken from this repository's history and installed with its own constraints into `.bench-venv-COMMIT`.
All GPUs are simulated. Compare the ratios: the times depend on the machine and the day. It stops by itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AGENT = Path(__file__).with_name("agent.py")
COMMIT = "cbb8954b"


@dataclass(frozen=True)
class Measure:
    """One order for both agents. Of `rounds` rounds the median counts."""

    what: str
    server: tuple[str, str]
    order: tuple[Any, ...]
    unit: str = "ms"
    at_most: float | None = 1.25

    @property
    def name(self) -> str:
        return str(self.order[0])


MANY, ONE = ("full", "64"), ("full", "1")
MEASURES = (
    Measure("lease + release over HTTP, full", MANY, ("leases", 30)),
    Measure("lease + release over HTTP, normal", ("normal", "64"), ("leases", 30)),
    Measure("lease + release, processor time of the server", MANY, ("server_cpu", 100), at_most=None),
    Measure("lease + release, blocking client, full", MANY, ("client", 30)),
    Measure("release to the next waiter, blocking client", ONE, ("hand_over", 20)),
    Measure("`kill -9` to the next waiter, blocking client", ONE, ("killed", 5)),
    Measure("`GET /gpu/summary`, one connection", MANY, ("summary", 100), at_most=None),
    Measure("`gpu-pool status`, processor time", MANY, ("command", "-m", "gpu_worker_pool", "status"), at_most=1.0),
    Measure(
        "`gpu-pool run -- true`, processor time",
        MANY,
        ("command", "-m", "gpu_worker_pool", "run", "--", "true"),
        at_most=1.0,
    ),
    Measure(
        "`import gpu_worker_pool`, processor time", MANY, ("command", "-c", "import gpu_worker_pool"), at_most=None
    ),
    Measure("a bare `python -c pass`, processor time", MANY, ("command", "-c", "pass"), at_most=None),
    Measure("memory of the server, PSS", MANY, ("memory",), unit="MB", at_most=None),
)


class Side:
    """One of the two trees: its interpreter, and an agent for each kind of server."""

    def __init__(self, python: Path, folder: Path, held: ExitStack) -> None:
        self._python = python
        self._folder = folder
        self._held = held
        self._agents: dict[tuple[str, str], subprocess.Popen[str]] = {}

    def measure(self, measure: Measure) -> float:
        agent = self._agents.get(measure.server)
        if agent is None:
            agent = self._agents[measure.server] = self._start(measure.server)
        return _ask(agent, measure.order)

    def _start(self, server: tuple[str, str]) -> subprocess.Popen[str]:
        # Outside both trees, so that each interpreter finds only the package that is installed for it.
        command = [str(self._python), "-P", str(AGENT), *server]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self._folder)
        self._held.callback(_end, agent)
        _hear(agent)
        return agent


def _end(agent: subprocess.Popen[str]) -> None:
    assert agent.stdin is not None
    agent.stdin.close()
    agent.wait(30)


def _ask(agent: subprocess.Popen[str], order: tuple[Any, ...]) -> float:
    assert agent.stdin is not None
    agent.stdin.write(f"{json.dumps(order)}\n")
    agent.stdin.flush()
    return float(_hear(agent))


def _hear(agent: subprocess.Popen[str]) -> Any:
    assert agent.stdout is not None
    line = agent.stdout.readline()
    if not line:
        raise SystemExit(f"an agent has ended with {agent.wait()}; its error is above")
    return json.loads(line)


def installed(commit: str) -> Path:
    """The interpreter of an environment that has the package as of `commit`."""
    folder = ROOT / f".bench-venv-{commit}"
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    packed = subprocess.run(
        [shutil.which("git") or "git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tempfile.TemporaryDirectory() as tree:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(tree, filter="data")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", f"{tree}/constraints.txt", f"{tree}[all]"], check=True)
    (folder / ".ready").touch()
    return python


def compare(measure: Measure, ours: Side, theirs: Side, rounds: int) -> str:
    """One row: ours, theirs, their ratio, and the lowest and highest ratio of a round."""
    values: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            before = theirs.measure(measure)
            values.append((ours.measure(measure), before))
        else:
            now = ours.measure(measure)
            values.append((now, theirs.measure(measure)))
    scale = 1000 if measure.unit == "ms" else 1
    now, before = (statistics.median(side) * scale for side in zip(*values, strict=True))
    ratios = sorted(mine / other for mine, other in values if other)
    ratio = statistics.median(ratios)
    if measure.at_most is None:
        verdict = ""
    else:
        verdict = f"{'reached' if ratio <= measure.at_most else 'missed'} (at most {measure.at_most:g} x)"
    return (
        f"| {measure.what} | {now:.3g} {measure.unit} | {before:.3g} {measure.unit} | {ratio:.2f} x | "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {verdict} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="the measures with this name")
    options = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ours = Side(Path(sys.executable), folder, held)
        theirs = Side(installed(options.commit), folder, held)
        print(f"| what | now | {options.commit} | ratio, median | of a round | target |")
        print("| --- | ---: | ---: | ---: | --- | --- |")
        for measure in MEASURES:
            if options.only in (None, measure.name):
                print(compare(measure, ours, theirs, options.rounds), flush=True)


if __name__ == "__main__":
    main()
