"""How this tree compares with an earlier commit of it, the base: both are installed, take turns, and are measured in one run.

    python -m benchmarks.beside [--base cbb8954b] [--rounds 11] [--only hand_over]

The base is taken from this repository's history and installed with its own constraints into `.bench-venv-COMMIT`.
All GPUs are simulated. Compare the ratios: the times depend on the machine and the day. It stops by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from benchmarks.figures import ROOT, Results, alone, compare, in_turn, parser
from benchmarks.processes import Child, environment

BASE = "cbb8954b"
ROUNDS, QUICK_ROUNDS = 11, 1
# The largest pool takes a while to fill.
ANSWER_S = 120.0


@dataclass(frozen=True)
class Measure:
    """One order for the agents of both sides. An agent is a script of this folder with these arguments."""

    id: str
    agent: tuple[str, ...]
    order: tuple[str | int, ...]
    unit: str = "s"
    is_for_quick: bool = True


MANY, ONE = ("agent", "full", "64"), ("agent", "full", "1")
# As a shell finds it: the interpreter of the side is put before it.
POOL = ("command", "-m", "gpu_worker_pool")
MEASURES = (
    Measure("memory_server", ("agent", "full", "8"), ("memory",), "MB"),
    Measure("memory_client", ("agent", "full", "8"), ("client_memory",), "MB"),
    Measure("lease_full", MANY, ("leases", 30)),
    Measure("lease_normal", ("agent", "normal", "64"), ("leases", 30)),
    Measure("lease_client", MANY, ("client", 30)),
    Measure("server_cpu", MANY, ("server_cpu", 100)),
    Measure("hand_over", ONE, ("hand_over", 20)),
    Measure("killed", ONE, ("killed", 5)),
    Measure("summary", MANY, ("summary", 100)),
    Measure("status_cpu", MANY, (*POOL, "status")),
    Measure("run_cpu", MANY, (*POOL, "run", "--", "true")),
    Measure("bare_cpu", MANY, ("command", "-c", "pass")),
    Measure("import", MANY, ("import_above_bare",)),
    Measure("decision_512", ("decisions", "512", "1000"), ("slowest", 20)),
    Measure("decision_10000", ("decisions", "10000", "10000"), ("slowest", 20), is_for_quick=False),
)


class Side:
    """One of the two trees: its interpreter, and the agents that it has started."""

    def __init__(self, python: Path, folder: Path, held: ExitStack) -> None:
        self._python = python
        self._folder = folder
        self._held = held
        self._agents: dict[tuple[str, ...], Child] = {}

    def measure(self, measure: Measure) -> float:
        """Carry out the order once. RuntimeError says why that failed."""
        agent = self._agents.get(measure.agent)
        if agent is None:
            agent = self._agents[measure.agent] = self._start(measure.agent)
        return float(agent.ask(*measure.order, limit_s=ANSWER_S))

    def _start(self, words: tuple[str, ...]) -> Child:
        script = Path(__file__).with_name(f"{words[0]}.py")
        # Outside both trees, so that each interpreter finds only the package that is installed for it.
        env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        agent = Child([self._python, "-P", script, *words[1:]], env, self._folder)
        self._held.callback(agent.close)
        agent.hear(ANSWER_S)
        return agent


def installed(commit: str) -> Path:
    """Return the interpreter of an environment that has the package as of `commit`; make it if there is none."""
    folder = ROOT / f".bench-venv-{commit}"
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    git = [shutil.which("git") or "git", "archive", commit]
    packed = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as tree:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(tree, filter="data")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", f"{tree}/constraints.txt", f"{tree}[all]"], check=True)
    (folder / ".ready").touch()
    return python


def add(results: Results, measure: Measure, sides: dict[str, Side], base: str, rounds: int) -> None:
    """Measure both sides in turn. Ours is shown alone where the base cannot do this."""
    found = in_turn({name: lambda side=side: side.measure(measure) for name, side in sides.items()}, rounds)  # type: ignore[misc]
    ours, theirs = found.get("ours"), found.get(base)
    if ours is None:
        results.leave_out(measure.id, "this tree failed; the error is in the output of the run")
    elif theirs is None:
        results.leave_out(f"{measure.id} of {base}", "the base failed; the error is in the output of the run")
        results.add(measure.id, alone(ours, measure.unit))
    else:
        results.add(measure.id, compare(ours, theirs, measure.unit, base))


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--base", default=BASE, metavar="COMMIT", help="the commit to compare with")
    options_of.add_argument("--rounds", type=int, help="how often both sides take turns")
    options_of.add_argument("--only", help="the measures whose id begins like this")
    options = options_of.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    results = Results("beside")
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            "ours": Side(Path(sys.executable), folder, held),
            options.base: Side(installed(options.base), folder, held),
        }
        for measure in MEASURES:
            if measure.id.startswith(options.only or "") and (measure.is_for_quick or not options.quick):
                add(results, measure, sides, options.base, rounds)
    results.finish(options)


if __name__ == "__main__":
    main()
