"""Run every benchmark, one after the other, and write docs/BENCHMARKS.md, its details, plots and data.

    python -m benchmarks.report                             # all benchmarks
    python -m benchmarks.report --quick                     # check that everything runs; write to a temporary folder
    python -m benchmarks.report --only leases --only pages  # these two; write to a temporary folder
    python -m benchmarks.report --add agents --note "..."   # measure this one, and put it among the stored data
    python -m benchmarks.report --soak FILE                 # put the summary of a soak among the stored data
    python -m benchmarks.report --again                     # write the documents and plots again, from the stored data

The document lists a benchmark that fails or takes too long with the reason. The others are still measured.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.report import soak
from benchmarks.report.machine import during_the_run, load, machine, processor_times
from benchmarks.report.measure import BENCHMARKS, measure, with_added
from benchmarks.report.writing import DATA, DOCS, stored, stored_soak, write

QUICK_NOTE = "This was a quick run, which only checks that everything runs. Its numbers mean nothing."


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="only check that everything runs")
    made.add_argument("--only", action="append", choices=[one.name for one in BENCHMARKS], help="measure these")
    made.add_argument(
        "--add", action="append", choices=[one.name for one in BENCHMARKS], help="measure these, and keep the others"
    )
    made.add_argument("--openb", type=Path, metavar="DIR", help="the folder with the trace for the replay")
    made.add_argument("--again", action="store_true", help="measure nothing; write the documents from the data again")
    made.add_argument("--soak", type=Path, metavar="FILE", help="measure nothing; store the summary that a soak wrote")
    made.add_argument("--note", help="a sentence about this run, shown in the document")
    options = made.parse_args()
    if options.again or options.soak:
        known = stored()
        if options.soak:
            try:
                known["soak"] = soak.read(options.soak)
            except soak.NoSummaryError as error:
                made.error(str(error))
        write({**known, "note": known["note"] if options.note is None else options.note}, DATA, DOCS)
        return
    # SIGTERM ends this program with an exception, so that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.add:
        if not options.note or options.quick or options.only:
            made.error("--add needs a --note that says when and how these were measured, and no --quick and no --only")
        measured = [measure(one, options) for one in BENCHMARKS if one.name in options.add]
        write({**with_added(stored(), measured, machine()), "note": options.note}, DATA, DOCS)
        return
    data, docs = DATA, DOCS
    if options.quick or options.only:
        docs = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        data = docs / DATA.name
    try:
        peers.make()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"The peers could not be installed: {error}", file=sys.stderr)
    note = options.note or (QUICK_NOTE if options.quick else "")
    run_data: dict[str, Any] = {"note": note, "machine": machine(), "plots_skipped": "", "soak": stored_soak()}
    wanted = [one for one in BENCHMARKS if not options.only or one.name in options.only]
    began, times = time.monotonic(), processor_times()
    run_data["benchmarks"] = [measure(benchmark, options) for benchmark in wanted]
    took_min = (time.monotonic() - began) / 60
    run_data["machine"]["all of it took"] = (
        f"{took_min:.1f} minutes, without installing the packages and drawing the plots"
    )
    run_data["machine"] |= {
        "load when it had ended": load(),
        "the processors meanwhile": during_the_run(times, processor_times()),
    }
    write(run_data, data, docs)


if __name__ == "__main__":
    main()
