"""docs/BENCHMARKS.md, made from the data of one run and nothing else: the same data make the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.shared.results import NOT_KNOWN, quantity, show

Data: TypeAlias = Mapping[str, Any]

# The figures with a target, in the order of the design. A figure that is missing is shown as not measured.
FIGURES = {
    "statistics_vs_bare": "`GET /gpu/summary`, relative to a bare ASGI handler",
    "statistics_logged_vs_bare": "the same with our access log on, relative to a bare handler without one",
    "statistics_while_probe_hangs": "p99 of a GET while `nvidia-smi` takes 2 s",
    "lease_fsync_vs_redis_fsync": "lease + release at `full`, relative to the Redis lock with fsync",
    "lease_vs_redis": "lease + release at `normal`, relative to the Redis lock",
    "lease_client_vs_redis_fsync": "lease + release at `full` by the blocking Python client, relative to the Redis lock with fsync",
    "lease_socket_vs_tcp": "lease + release over the Unix socket, relative to TCP",
    "full_vs_normal_64_gpus": "64 clients: the rate at `full`, relative to `normal`",
    "full_vs_normal_8_gpus": "the same with 8 GPUs",
    "crowd_vs_redis": "64 client processes on 8 GPUs, relative to the Redis lock",
    "crowd_vs_ray": "the same, relative to Ray",
    "hand_over_vs_blpop": "release to the next waiter, relative to `BLPOP` of Redis",
    "hand_over_vs_ray": "the same, relative to Ray",
    "reclaim_vs_postgres": "`kill -9` of a holder to the next waiter, relative to PostgreSQL's advisory lock",
    "lease_1000_gpus": "lease + release with 1,000 GPUs, relative to 8",
    "lease_10000_waiters": "lease + release with 10,000 waiters, relative to none",
    "lease_growth_waiters": "growth of a lease + release with the waiters",
    "lease_growth_gpus": "growth of a lease + release with the GPUs",
    "decision_time": "the slowest kind of decision at 10,000 GPUs and waiters",
    "decision_growth": "growth of a decision",
    "longest_turn": "the longest turn of the event loop with many tiny shares",
    "metrics_turn": "`/metrics` with 1,024 GPUs: the longest turn of the event loop",
    "pages_p99": "p99 of a lease + release with 50 open pages, relative to none",
    "endpoints_first_gpu": "a client with 100 endpoints, some dead: time to the first GPU",
    "run_with_silent_box": "`gpu-pool run` with one silent box of three, relative to without it",
    "leader_lost": "a fleet that lost its leader: time until it grants again",
    "lease_in_fleet": "lease + release through a box of a fleet that does not lead",
    "busy_leader": "processor share of the leader of 1,000 boxes while GPUs change hands",
    "idle_leader": "the same while nothing happens",
    "fleet_hand_over_p99": "release to the next waiter in that fleet, p99",
    "leader_turn": "the longest turn of the event loop of that leader",
    "import_time": "import of the client",
    "import_weight": "what the client imports",
    "memory_server": "memory of an idle server",
    "memory_leader": "memory of a leader with 10,000 GPUs, leases and waiters",
    "memory_client": "memory of a client that holds a GPU",
    "slow_readers": "memory of a server whose readers do not read",
    "replay_allocated": "GPU capacity allocated at 130 % demand, of a real trace",
    "replay_wait": "mean wait of all requests, of that trace on few GPUs",
    "replay_wait_wide": "mean wait of requests for 5 and more GPUs, of that trace on few GPUs",
    "replay_synthetic_wide": "mean wait for 8 GPUs with a synthetic load",
}
VERDICTS = {True: "reached", False: "**missed**", None: "not measured"}
TRACE = "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023"


def document(run: Data) -> str:
    """Return the whole text."""
    lines: list[str] = []
    for part in (_opening(run), _figures(run), _missing(run), *(_benchmark(run, one) for one in run["benchmarks"])):
        lines += [*part, ""]
    return "\n".join(lines).rstrip() + "\n"


def image_of(name: str, plot_id: str) -> str:
    """Return the file name of a plot."""
    return f"bench-{name}-{plot_id}.svg".replace("_", "-")


def _opening(run: Data) -> Iterator[str]:
    yield "# Benchmarks"
    yield ""
    yield "`make bench` writes this document from `benchmarks/measured.json`. Do not edit it. Every number was measured in one run"
    yield "on one machine, except for parameters, targets and numbers that are marked as quoted. Compare ratios rather than times:"
    yield "the contenders take turns in the same run, but times depend on the machine. Rounds, blocks and other ranges show the"
    yield "lowest and the highest value."
    yield ""
    yield "To measure again, run `make bench OPENB=folder`. `make bench QUICK=1` checks in a few minutes that everything runs, and"
    yield "writes nothing here. Both install the Python packages to compare with into `.bench-venv`. They use redis-server and"
    yield "PostgreSQL if these are installed. The replayed trace is public. `OPENB` names the folder with its files"
    yield f"`openb_node_list_gpu_node.csv` and `openb_pod_list_default.csv` of [cluster-trace-gpu-v2023]({TRACE})."
    yield ""
    if run["note"]:
        yield f"**{_plain(run['note'])}**"
        yield ""
    yield "## The machine"
    yield ""
    yield from _table(["", ""], list(run["machine"].items()))


def _figures(run: Data) -> Iterator[str]:
    found = {figure["id"]: figure for results in _all_results(run) for figure in results["figures"]}
    yield "## Targets"
    yield ""
    rows = []
    for figure_id, what in FIGURES.items():
        figure = found.pop(figure_id, None)
        rows.append(_figure_row(figure) if figure else [what, NOT_KNOWN, NOT_KNOWN, VERDICTS[None], "see below"])
    rows += [_figure_row(figure) for figure in found.values()]
    yield from _table(["what", "measured", "target", "", "why it was missed"], rows)


def _figure_row(figure: Data) -> list[str]:
    measured = quantity(figure["value"], figure["unit"])
    if figure["spread"]:
        measured += f" ({figure['spread']})"
    return [figure["what"], measured, figure["target"], VERDICTS[figure["is_met"]], figure["why"]]


def _missing(run: Data) -> Iterator[str]:
    reasons = [f"{one['name']}: {one['failure']}" for one in run["benchmarks"] if one["failure"]]
    reasons += [f"{skip['what']}: {skip['reason']}" for results in _all_results(run) for skip in results["skipped"]]
    if run["plots_skipped"]:
        reasons.append(f"plots: {run['plots_skipped']}")
    yield "## Not measured"
    yield ""
    yield from [f"- {_plain(reason)}" for reason in reasons] or ["Everything was measured."]


def _benchmark(run: Data, one: Data) -> Iterator[str]:
    yield f"## {one['name']}"
    yield ""
    results = one["results"]
    if results is None:
        yield f"Not measured: {_plain(one['failure'])}"
        return
    yield f"{results['about']} Measured by `{one['command']}` in {show(one['took_s'])} s."
    for note in results["notes"]:
        yield ""
        yield _plain(note)
    for table in results["tables"]:
        yield ""
        yield f"### {_plain(table['title'])}"
        yield ""
        yield from _table(table["columns"], table["rows"])
        if table["note"]:
            yield ""
            yield _plain(table["note"])
    for plot in () if run["plots_skipped"] else results["plots"]:
        yield ""
        yield f"![{_plain(plot['title'])}](images/{image_of(results['name'], plot['id'])})"
        if plot["note"]:
            yield ""
            yield _plain(plot["note"])


def _all_results(run: Data) -> list[Data]:
    return [one["results"] for one in run["benchmarks"] if one["results"] is not None]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of a table. Columns of numbers are aligned right, except for the first, which names the row."""
    texts = [[show(cell) for cell in row] for row in rows]
    yield _row(columns)
    sides = (
        "---:" if number and _is_numbers([row[number] for row in texts]) else "---" for number in range(len(columns))
    )
    yield f"| {' | '.join(sides)} |"
    yield from (_row(row) for row in texts)


def _is_numbers(cells: Sequence[str]) -> bool:
    return all(cell == NOT_KNOWN or cell[:1].isdigit() or cell[:2].strip("-")[:1].isdigit() for cell in cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return the text as one line in which Markdown finds no tag."""
    text = " ".join(text.split())
    return text.replace("<=", "≤").replace(">=", "≥").replace("->", "→").replace("<", "&lt;")
