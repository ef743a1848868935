"""Runs every benchmark, one after the other, and writes docs/BENCHMARKS.md, its plots and the data they come from.

    python benchmarks/report.py                             # all of it
    python benchmarks/report.py --quick                     # whether everything runs; into a temporary folder
    python benchmarks/report.py --only leases --only pages  # these; into a temporary folder
    python benchmarks/report.py --again                     # the document and plots anew, from the data that are there

What fails or takes too long is listed in the document with the reason, and the others are still measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers
from document import document
from results import Results, to_json

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENT = ROOT / "docs" / "BENCHMARKS.md"
DATA = HERE / "measured.json"
IMAGES = "images"
# Part of what is measured, so that its version matters.
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "aiohttp")
QUICK_S = 180.0
QUICK_NOTE = "This was a quick run, which only shows that everything runs: its numbers mean nothing."
# For a benchmark that is told to stop to end the servers it has started.
STOP_S = 20.0
NODES, PODS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"


@dataclass(frozen=True)
class Benchmark:
    """`limit_s` is about twice what it takes on two cores."""

    name: str
    limit_s: float


BENCHMARKS = (
    Benchmark("leases", 240),
    Benchmark("contenders", 600),
    Benchmark("serving", 120),
    Benchmark("pages", 120),
    Benchmark("endpoints", 120),
    Benchmark("import_time", 60),
    Benchmark("decisions", 90),
    Benchmark("growth", 180),
    Benchmark("balancing", 60),
    Benchmark("replay", 420),
)


class NotMeasuredError(Exception):
    """The text says why."""


def measure(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """What it measured, or why it did not."""
    script = f"benchmarks/{benchmark.name}.py"
    command = ["python", script, *(["--quick"] if options.quick else [])]
    print(f"\n=== {script}\n", flush=True)
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
    # As one would type it, without the place that a folder has on this machine.
    shown = " ".join(Path(word).name if word.endswith(".csv") else word for word in command)
    took_s = round(time.monotonic() - began, 1)
    return {"name": benchmark.name, "command": shown, "took_s": took_s, "failure": failure, "results": results}


def read(data: Path) -> dict[str, Any]:
    """What a benchmark wrote. One of another shape must not spoil the document of all others."""
    if not data.is_file():
        raise NotMeasuredError("it wrote nothing")
    results: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    if missing := {field.name for field in fields(Results)} - results.keys():
        raise NotMeasuredError(
            f"what it wrote is not of the shape of benchmarks/results.py: no {', '.join(sorted(missing))}"
        )
    return results


def trace(folder: Path | None) -> list[str]:
    """The options that name the trace."""
    if folder is None:
        raise NotMeasuredError("no trace was named: make bench OPENB=folder")
    missing = [name for name in (NODES, PODS) if not (folder / name).is_file()]
    if missing:
        raise NotMeasuredError(f"the folder named by OPENB has no {' and no '.join(missing)}")
    return ["--nodes", str(folder.resolve() / NODES), "--pods", str(folder.resolve() / PODS)]


def run(command: list[str], limit_s: float) -> None:
    """To its end; where it takes too long it is told to stop, so that it ends what it has started."""
    if not (ROOT / command[1]).is_file():
        raise NotMeasuredError(f"there is no {command[1]}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        # In a session of its own, so that whatever it leaves behind can be ended with it, and nothing else.
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
    """Ask it, then make it; then whatever it left in its session."""
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


def machine() -> dict[str, str]:
    """What it was measured on, for people."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpu if line.startswith("model name")), platform.machine())
    memory_kb = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_kb / 1024 / 1024:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before it began": f"{os.getloadavg()[0]:.2f} processes, mean of the last minute",
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))),
    }


def commit() -> str:
    """Of what it is measured; where that is not all in the commit, that is said."""

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", "gpu_worker_pool", HERE.name)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return f"{head}{', with changes that are not in it' if changed else ''}"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def draw(data: Path, images: Path) -> str:
    """Why there are no plots; empty where they are drawn. Plots of before are removed."""
    for old in images.glob("bench-*.svg"):
        old.unlink()
    command = [str(HERE / "plots.py"), str(data), str(images)]
    try:
        subprocess.run([str(peers.python_with("matplotlib")), *command], check=True, timeout=300)
    except peers.MissingError as missing:
        return str(missing)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"matplotlib failed: {type(error).__name__}"
    return ""


def write(run_data: dict[str, Any], data: Path, text: Path) -> None:
    """The data, the plots, and the document that shows both."""
    text.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(to_json(run_data), encoding="utf-8")
    run_data["plots_skipped"] = draw(data, text.parent / IMAGES)
    data.write_text(to_json(run_data), encoding="utf-8")
    text.write_text(document(run_data), encoding="utf-8")
    print(f"\nWritten: {text}, from {data}")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="only see that everything runs")
    made.add_argument("--only", action="append", choices=[one.name for one in BENCHMARKS], help="measure these")
    made.add_argument("--openb", type=Path, metavar="DIR", help="the folder with the trace for replay.py")
    made.add_argument("--again", action="store_true", help="measure nothing; write the document from the data again")
    made.add_argument("--note", help="a sentence about this run, to stand in the document")
    options = made.parse_args()
    if options.again:
        known = json.loads(DATA.read_text(encoding="utf-8"))
        write({**known, "note": known["note"] if options.note is None else options.note}, DATA, DOCUMENT)
        return
    # Told to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    data, text = DATA, DOCUMENT
    if options.quick or options.only:
        folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        data, text = folder / DATA.name, folder / DOCUMENT.name
    try:
        peers.make()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"The peers could not be installed: {error}", file=sys.stderr)
    note = options.note or (QUICK_NOTE if options.quick else "")
    run_data: dict[str, Any] = {"note": note, "machine": machine(), "plots_skipped": ""}
    wanted = [one for one in BENCHMARKS if not options.only or one.name in options.only]
    began = time.monotonic()
    run_data["benchmarks"] = [measure(benchmark, options) for benchmark in wanted]
    took_min = (time.monotonic() - began) / 60
    run_data["machine"]["all of it took"] = f"{took_min:.1f} minutes, without installing the others and drawing"
    write(run_data, data, text)


if __name__ == "__main__":
    main()
