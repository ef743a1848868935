"""Run one benchmark in a process of its own, up to a time limit, and read what it wrote."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.shared.results import Results

ROOT = Path(__file__).parents[2]
QUICK_S = 180.0
# How long a benchmark that is told to stop may take to end the servers it has started.
STOP_S = 20.0
NODES, PODS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. `limit_s` is about twice what it takes on two cores."""

    name: str
    limit_s: float


BENCHMARKS = (
    Benchmark("leases", 240),
    Benchmark("steps", 90),
    Benchmark("contenders", 600),
    Benchmark("serving", 150),
    Benchmark("pages", 150),
    Benchmark("memory", 90),
    Benchmark("endpoints", 120),
    Benchmark("import_time", 60),
    Benchmark("executors", 180),
    Benchmark("decisions", 120),
    Benchmark("turns", 90),
    Benchmark("journals", 120),
    Benchmark("take_over", 240),
    Benchmark("agents", 420),
    Benchmark("fleet", 300),
    Benchmark("balancing", 60),
    Benchmark("replay", 500),
)


class NotMeasuredError(Exception):
    """A benchmark could not be measured; the text says why."""


def measure(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a benchmark measured, or why it measured nothing."""
    module = f"benchmarks.{benchmark.name}"
    command = ["python", "-m", module, *(["--quick"] if options.quick else [])]
    print(f"\n=== {module}\n", flush=True)
    began = time.monotonic()
    results, failure = None, ""
    try:
        if benchmark.name == "replay":
            command += trace(options.openb)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            data = Path(folder) / "results.json"
            limit_s = min(benchmark.limit_s, QUICK_S) if options.quick else benchmark.limit_s
            run([sys.executable, *command[1:], "--json", str(data)], limit_s)
            results = read(data)
    except NotMeasuredError as error:
        failure = str(error)
        print(f"not measured: {failure}", flush=True)
    # As a user would type it, without the folders of this machine.
    shown = " ".join(Path(word).name if word.endswith(".csv") else word for word in command)
    took_s = round(time.monotonic() - began, 1)
    return {"name": benchmark.name, "command": shown, "took_s": took_s, "failure": failure, "results": results}


def with_added(known: dict[str, Any], measured: list[dict[str, Any]], of_run: dict[str, str]) -> dict[str, Any]:
    """Return stored data with these benchmarks in them, in the order of the list. Those of the same name are replaced. Each keeps
    the date and the commit of its run, which `of_run` has for the new ones.
    """
    old = [{**run_of(known["machine"]), **one} for one in known["benchmarks"]]
    by_name = {one["name"]: one for one in (*old, *({**one, **run_of(of_run)} for one in measured))}
    benchmarks = [by_name[one.name] for one in BENCHMARKS if one.name in by_name]
    took = f"{sum(one['took_s'] for one in benchmarks) / 60:.1f} minutes, in several runs"
    return {**known, "machine": {**known["machine"], "all of it took": took}, "benchmarks": benchmarks}


def run_of(machine: dict[str, str]) -> dict[str, str]:
    """Return the date and the commit of a run."""
    return {name: machine[name] for name in ("date", "commit") if name in machine}


def read(data: Path) -> dict[str, Any]:
    """Return what a benchmark wrote. Results of another shape are refused, so that the document still shows the others."""
    if not data.is_file():
        raise NotMeasuredError("it wrote nothing")
    results: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    if missing := {field.name for field in fields(Results)} - results.keys():
        raise NotMeasuredError(
            f"what it wrote does not match benchmarks/shared/results.py: no {', '.join(sorted(missing))}"
        )
    return results


def trace(folder: Path | None) -> list[str]:
    """Return the options that name the trace."""
    if folder is None:
        raise NotMeasuredError("no trace was named: make bench OPENB=folder")
    missing = [name for name in (NODES, PODS) if not (folder / name).is_file()]
    if missing:
        raise NotMeasuredError(f"the folder named by OPENB has no {' and no '.join(missing)}")
    return ["--nodes", str(folder.resolve() / NODES), "--pods", str(folder.resolve() / PODS), "--variants"]


def run(command: list[str], limit_s: float) -> None:
    """Run the command to its end. A command that takes too long is told to stop, so that it ends what it has started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        # In a session of its own, so that the processes it leaves behind can be ended, and no others.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NotMeasuredError(f"it took longer than {limit_s:g} s") from None
        finally:
            end(process)
        errors.seek(0)
        said = errors.read()
    sys.stderr.write(said)
    if code != 0:
        last = (said.strip().splitlines() or [f"exit code {code}"])[-1]
        raise NotMeasuredError(f"it failed: {last[:300]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, first by SIGINT and then by SIGKILL; then kill what it left in its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
