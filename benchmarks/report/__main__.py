"""Runs every benchmark, one after the other, and writes docs/BENCHMARKS.md, its plots and the data they come from.

    python -m benchmarks.report                             # all of it
    python -m benchmarks.report --quick                     # whether everything runs; into a temporary folder
    python -m benchmarks.report --only leases --only pages  # these; into a temporary folder
    python -m benchmarks.report --again                     # the document and plots anew, from the data that are there

What fails or takes too long is listed in the document with the reason, and the others are still measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.report.machine import machine
from benchmarks.report.measure import BENCHMARKS, measure
from benchmarks.report.writing import DATA, DOCUMENT, write

QUICK_NOTE = "This was a quick run, which only shows that everything runs: its numbers mean nothing."


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="only see that everything runs")
    made.add_argument("--only", action="append", choices=[one.name for one in BENCHMARKS], help="measure these")
    made.add_argument("--openb", type=Path, metavar="DIR", help="the folder with the trace for the replay")
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
