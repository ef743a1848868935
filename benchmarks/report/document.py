"""docs/BENCHMARKS.md and docs/BENCHMARK_DETAILS.md, made from stored data and nothing else: the same data make the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from benchmarks.report import soak
from benchmarks.report.figures import FIGURES, OF_DESIGN, OWN, READING, READING_GPUS, Known
from benchmarks.report.markdown import Data, plain, table
from benchmarks.shared.results import NOT_KNOWN, show, shown

VERDICTS = {True: "reached", False: "**missed**", None: "not measured"}
DOCUMENT, DETAILS = "BENCHMARKS.md", "BENCHMARK_DETAILS.md"
TRACE = "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023"


def document(run: Data) -> str:
    """Return docs/BENCHMARKS.md: the targets, and what people ask for first."""
    parts = [_opening(run), _figures(run), _missing(run)]
    parts += [_headlines(run, one) for one in run["benchmarks"] if one["results"] and has_headlines(one["results"])]
    if run.get("soak"):
        parts.append(soak.section(run["soak"]))
    return _joined(parts)


def details(run: Data) -> str:
    """Return docs/BENCHMARK_DETAILS.md: everything else that was measured."""
    parts = [_details_opening(), _spreads(run), _skipped(run)]
    parts += [_details(run, one) for one in run["benchmarks"] if one["results"] and has_details(one["results"])]
    return _joined(parts)


def image_of(name: str, plot_id: str) -> str:
    """Return the file name of a plot."""
    return f"bench-{name}-{plot_id}.svg".replace("_", "-")


def has_headlines(results: Data) -> bool:
    return any(_of_place((*results["tables"], *results["plots"]), is_headline=True))


def has_details(results: Data) -> bool:
    return any(_of_place((*results["tables"], *results["plots"]), is_headline=False))


def _opening(run: Data) -> Iterator[str]:
    yield "# Benchmarks"
    yield ""
    yield f"`make bench` writes this document and [the details]({DETAILS}) from `benchmarks/measured.json`. Do not edit them."
    yield f"{_told_runs(run)} This does not apply to parameters, targets, the soak and numbers that are marked as quoted."
    yield "Compare ratios rather than times: the contenders take turns in the same run, but times depend on the machine. Rounds, blocks"
    yield 'and other ranges show the lowest and the highest value. A "middle half" leaves out the lowest and the highest quarter.'
    yield ""
    reading = run["machine"].get(READING)
    yield f"**All GPUs are simulated**{f': a reading of {READING_GPUS} of them takes {reading}' if reading else ''}. Each hand-over contains"
    yield "a reading. A real driver takes longer. If a reading takes longer than 5 ms, the server writes the end of a lease and the next"
    yield "grant in two commits instead of one. **All servers, clients and boxes are on this one machine** and talk over loopback. A fleet"
    yield "of 1,000 boxes is one process that plays all of them beside its leader."
    yield ""
    yield "To measure again, run `make bench OPENB=folder`. `make bench QUICK=1` checks in a few minutes that everything runs, and"
    yield "writes nothing here. Both install the Python packages to compare with into `.bench-venv`. They use redis-server and"
    yield "PostgreSQL if these are installed. The replayed trace is public. `OPENB` names the folder with its files"
    yield f"`openb_node_list_gpu_node.csv` and `openb_pod_list_default.csv` of [cluster-trace-gpu-v2023]({TRACE})."
    yield ""
    if run["note"]:
        yield f"**{plain(run['note'])}**"
        yield ""
    yield "## The machine"
    yield ""
    yield from table(["", ""], list(run["machine"].items()))


def _figures(run: Data) -> Iterator[str]:
    found = _found(run)
    yield "## Targets"
    yield ""
    yield f"{_told_verdicts('targets of the design', OF_DESIGN, found)} They were set before this run, in a design document that is not"
    yield "in the repository."
    yield ""
    yield from _verdicts(OF_DESIGN, found)
    yield ""
    yield "### Own bounds"
    yield ""
    own = {**OWN, **{figure_id: Known("", "") for figure_id in found.keys() - FIGURES.keys()}}
    yield f"{_told_verdicts('bounds that the benchmarks set for themselves', own, found)} The design does not have them."
    yield ""
    yield from _verdicts(own, found)
    yield ""
    yield f"[The details]({DETAILS}#targets) have the spread of each."


def _told_verdicts(what: str, known: Mapping[str, Known], found: Mapping[str, Data]) -> str:
    verdicts = [found[figure_id]["is_met"] if figure_id in found else None for figure_id in known]
    reached, missed, missing = (verdicts.count(verdict) for verdict in VERDICTS)
    return f"Of {len(verdicts)} {what}, {reached} are reached, {missed} missed and {missing} not measured."


def _verdicts(known: Mapping[str, Known], found: Mapping[str, Data]) -> Iterator[str]:
    rows = []
    for figure_id, (what, target) in known.items():
        if (figure := found.get(figure_id)) is None:
            rows.append([what, NOT_KNOWN, target, VERDICTS[None], "no benchmark of this run has measured it"])
        else:
            rows.append([figure["what"], shown(figure), figure["target"], VERDICTS[figure["is_met"]], figure["why"]])
    yield from table(["what", "measured", "target", "", "why it was missed"], rows)


def _spreads(run: Data) -> Iterator[str]:
    yield "## Targets"
    yield ""
    found = _found(run)
    in_order = [found.pop(figure_id) for figure_id in FIGURES if figure_id in found]
    figures = [figure for figure in (*in_order, *found.values()) if figure["spread"]]
    rows = [[figure["what"], shown(figure), figure["spread"]] for figure in figures]
    yield from table(["what", "measured", "spread, and what was seen beside it"], rows)


def _found(run: Data) -> dict[str, Data]:
    return {figure["id"]: figure for results in _all_results(run) for figure in results["figures"]}


def _told_runs(run: Data) -> str:
    if len(_runs(run)) > 1:
        return f"The numbers were measured in {len(_runs(run))} runs on one machine, and each section says in which."
    return "Every number was measured in one run on one machine."


def _runs(run: Data) -> set[tuple[str, str]]:
    return {_run_of(run, one) for one in run["benchmarks"]}


def _run_of(run: Data, one: Data) -> tuple[str, str]:
    """Return the date and the commit of a benchmark. One that was not measured alone has those of the machine's table."""
    date, commit = (one.get(name) or run["machine"].get(name, NOT_KNOWN) for name in ("date", "commit"))
    return date, commit


def _missing(run: Data) -> Iterator[str]:
    reasons = [f"{one['name']}: {one['failure']}" for one in run["benchmarks"] if one["failure"]]
    if not run.get("soak"):
        reasons.append(f"{soak.TITLE}: {soak.MISSING}")
    if run["plots_skipped"]:
        reasons.append(f"plots: {run['plots_skipped']}")
    yield "## Not measured"
    yield ""
    yield from [f"- {plain(reason)}" for reason in reasons]
    yield f"- contenders and parts that were left out: [the details]({DETAILS}#left-out) list them with the reasons"


def _details_opening() -> Iterator[str]:
    yield "# Benchmarks: the details"
    yield ""
    yield f"`make bench` writes this document from `benchmarks/measured.json`. Do not edit it. [Benchmarks]({DOCUMENT}) has the"
    yield "targets, the machine, and the tables that people ask for first. This document has all others."


def _skipped(run: Data) -> Iterator[str]:
    reasons = [f"{skip['what']}: {skip['reason']}" for results in _all_results(run) for skip in results["skipped"]]
    yield "## Left out"
    yield ""
    yield from [f"- {plain(reason)}" for reason in reasons] or ["Nothing was left out."]


def _headlines(run: Data, one: Data) -> Iterator[str]:
    yield from _top(run, one)
    yield from _tables_and_plots(run, one["results"], is_headline=True)
    if has_details(one["results"]):
        yield ""
        yield f"More in [the details]({DETAILS}#{one['name']})."


def _details(run: Data, one: Data) -> Iterator[str]:
    if has_headlines(one["results"]):
        yield f"## {one['name']}"
        yield ""
        yield f"{one['results']['about']} The first tables are in [Benchmarks]({DOCUMENT}#{one['name']})."
    else:
        yield from _top(run, one)
    yield from _tables_and_plots(run, one["results"], is_headline=False)


def _top(run: Data, one: Data) -> Iterator[str]:
    results = one["results"]
    date, commit = _run_of(run, one)
    when = f" on {date} with commit {plain(commit)}" if len(_runs(run)) > 1 else ""
    yield f"## {one['name']}"
    yield ""
    yield f"{results['about']} Measured by `{one['command']}` in {show(one['took_s'])} s{when}."
    for note in results["notes"]:
        yield ""
        yield plain(note)


def _tables_and_plots(run: Data, results: Data, *, is_headline: bool) -> Iterator[str]:
    for each in _of_place(results["tables"], is_headline=is_headline):
        yield ""
        yield f"### {plain(each['title'])}"
        yield ""
        yield from table(each["columns"], each["rows"])
        if each["note"]:
            yield ""
            yield plain(each["note"])
    for plot in () if run["plots_skipped"] else _of_place(results["plots"], is_headline=is_headline):
        yield ""
        yield f"![{plain(plot['title'])}](images/{image_of(results['name'], plot['id'])})"
        if plot["note"]:
            yield ""
            yield plain(plot["note"])


def _of_place(found: Iterable[Data], *, is_headline: bool) -> Iterator[Data]:
    """Yield the tables or plots of a document. Those of an older run do not say, and are details."""
    return (one for one in found if one.get("is_headline", False) == is_headline)


def _all_results(run: Data) -> list[Data]:
    return [one["results"] for one in run["benchmarks"] if one["results"] is not None]


def _joined(parts: Iterable[Iterator[str]]) -> str:
    lines: list[str] = []
    for part in parts:
        lines += [*part, ""]
    return "\n".join(lines).rstrip() + "\n"
