"""docs/why/benchmarks.md, made of the stored results and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.figures import Figure, cells
from benchmarks.targets import TARGETS

HEAD = """\
# Benchmarks

`make bench` measures this in less than 12 minutes and writes this page from `benchmarks/measured.json`. Do not edit it.
`benchmarks/targets.py` has the targets. A figure that no run has measured yet is shown as "not measured yet".

Compare ratios rather than times. Ours and what it is measured beside take turns in one run on one machine, and the ratio is
ours divided by theirs: the median of the rounds. The lowest and the highest round stand beside it. Where no ratio is given, the
range is that of the value. **All GPUs are simulated**, and all servers, clients and boxes are on this machine.
"""
PARTS = {
    "beside": "This tree beside an earlier commit of it, the base: both are installed, and take turns.",
    "serving": "Beside a bare ASGI handler under uvicorn that sends the same bytes.",
    "contenders": "Our blocking Python client at `full`, beside what people would use instead. A scheduler of jobs starts a process for each grant; ours starts none.",
    "sweep": "Many short commands on 8 GPUs. HyperQueue gets them as one job on 8 cores, `ts` (task-spooler) one by one with 8 slots.",
    "next_command": "Several commands wait for one GPU, in HyperQueue for one core. The time is from the last instruction of one, a shell, to the first of the next. For `true` alone HyperQueue's client runs already, because its wheel has no command.",
    "fleet": "Real servers on a real PostgreSQL that syncs each commit. Of 1,000 boxes only the leader is a real server: one process plays the others, and each lease there takes all 8 GPUs of a box.",
    "replay": "The public trace [OpenB](https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023) through the core, in simulated time. `make bench OPENB=folder` names its folder.",
}
AGAIN = """\
## Measure again

```
make bench                  # all parts
make bench QUICK=1          # only check that everything runs; writes nothing
make bench ONLY=sweep       # one part; the others keep what was measured
make bench BASE=v1.0.0      # beside another commit
```

`python -m benchmarks.peers` installs the contenders of PyPI into `.bench-venv`. Slurm and `ts` are Debian's packages `slurm-wlm` and
`task-spooler`. A contender that is not installed is left out, with the reason.
"""


def document(stored: Mapping[str, Any]) -> str:
    """Return the whole page."""
    return "\n".join(_lines(stored))


def _lines(stored: Mapping[str, Any]) -> Iterator[str]:
    parts: Mapping[str, Any] = stored.get("parts", {})
    figures = {name: Figure(**each) for part in parts.values() for name, each in part["figures"].items()}
    verdicts = [target.verdict(found.value, found.ratio) for target in TARGETS if (found := figures.get(target.id))]
    bounded = sum(target.at_most is not None or target.at_least is not None for target in TARGETS)
    yield HEAD
    yield (
        f"Of {bounded} targets {verdicts.count('reached')} are reached, {verdicts.count('missed')} missed and "
        f"{bounded - verdicts.count('reached') - verdicts.count('missed')} not measured yet."
    )
    yield ""
    yield "| what | ours | beside | ratio | rounds | target |  |"
    yield "| --- | ---: | ---: | ---: | --- | --- | --- |"
    for part in PARTS:
        yield f"| **{part}** |  |  |  |  |  |  |"
        for target in TARGETS:
            if target.part == part:
                *told, verdict = cells(target, figures.get(target.id))
                yield f"| {' | '.join([target.what, *told])} | {'**missed**' if verdict == 'missed' else verdict} |"
    yield ""
    for part, about in PARTS.items():
        yield f"- **{part}**: {about}{_run(parts.get(part))}"
    notes = [f"- {name}: {each.note}" for name, each in figures.items() if each.note]
    left_out = [f"- {part}: {what}: {why}" for part, each in parts.items() for what, why in each["left_out"].items()]
    for title, lines in (("Notes", notes), ("Left out", left_out)):
        if lines:
            yield f"\n## {title}\n"
            yield from lines
    yield ""
    yield AGAIN
    if machine := stored.get("machine"):
        yield "## The machine\n"
        yield "|  |  |\n| --- | --- |"
        yield from (f"| {name} | {value} |" for name, value in machine.items())
        yield ""


def _run(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return ""
    return f" Measured on {part['date']} with commit {part['commit']} in {part['took_s']:.0f} s."
