"""Run the parts of the benchmarks one after the other, store what they measured, and write docs/why/benchmarks.md.

    python -m benchmarks [--quick] [--only PART] [--base COMMIT] [--openb FOLDER]
    python -m benchmarks --write      # only write the page again from benchmarks/measured.json

With --quick nothing is stored and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.document import document
from benchmarks.figures import ROOT
from benchmarks.machine import commit, machine

STORED = ROOT / "benchmarks" / "measured.json"
DOCUMENT = ROOT / "docs" / "why" / "benchmarks.md"
# Each part with its limit in seconds, about twice what it takes on two cores.
PARTS = {
    "beside": 360.0,
    "serving": 60.0,
    "contenders": 240.0,
    "sweep": 400.0,
    "next_command": 180.0,
    "fleet": 300.0,
    "replay": 180.0,
}
# A part that is told to stop has this long to end what it has started.
STOP_S = 20.0


class NotMeasuredError(Exception):
    """A part could not be measured; the text says why."""


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own, and return what it measured."""
    print(f"\n=== {part}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.{part}", "--json", str(data)]
        command += ["--quick"] if options.quick else []
        if part == "beside" and options.base:
            command += ["--base", options.base]
        if part == "replay":
            if options.openb is None:
                raise NotMeasuredError("no trace was named: make bench OPENB=folder")
            command += ["--openb", str(options.openb.resolve())]
        run(command, PARTS[part])
        found: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return found


def run(command: list[str], limit_s: float) -> None:
    """Run a command to its end, or until its limit; then end what is left of its session."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"it took longer than {limit_s:g} s") from None
    finally:
        _end(process)
    if code:
        raise NotMeasuredError(f"it failed with exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def stored() -> dict[str, Any]:
    """Return what earlier runs have measured."""
    known: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {"parts": {}}
    return known


def write(known: dict[str, Any]) -> None:
    """Store the results, and write the page."""
    STORED.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(known), encoding="utf-8")
    print(f"\nwritten: {DOCUMENT.relative_to(ROOT)}, from {STORED.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only check that everything runs; write nothing")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="only this part; may be given again")
    parser.add_argument(
        "--base", metavar="COMMIT", help="the commit to compare with; by default that of benchmarks.beside"
    )
    parser.add_argument("--openb", type=Path, metavar="FOLDER", help="the folder of the public trace OpenB")
    parser.add_argument("--write", action="store_true", help="measure nothing, and write the page again")
    options = parser.parse_args()
    known = stored()
    if options.write:
        write(known)
        return
    known["machine"] = machine()
    failed = []
    for part in options.only or PARTS:
        began = time.monotonic()
        try:
            found = measure(part, options)
        except NotMeasuredError as error:
            print(f"not measured: {error}", file=sys.stderr)
            failed.append(f"{part}: {error}")
            continue
        took_s = time.monotonic() - began
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        known["parts"][part] = {"date": today, "commit": commit(), "took_s": round(took_s, 1), **found}
        print(f"{part} took {took_s:.0f} s", flush=True)
    if not options.quick:
        write(known)
    if failed:
        raise SystemExit("not measured: " + "; ".join(failed))


if __name__ == "__main__":
    main()
