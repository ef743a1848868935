"""The three parts of what `gpu-pool top` shows: the GPUs, the leases, the queue. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from gpu_worker_pool.cli.commands.status import SAID_BY_HOLDERS, STATE_STYLES
from gpu_worker_pool.cli.pools.naming import short_ids
from gpu_worker_pool.cli.pools.plans import BookingReport
from gpu_worker_pool.cli.pools.report import LeaseReport, show_holding, show_outsiders, show_since
from gpu_worker_pool.cli.pools.terms import short_start, show_terms
from gpu_worker_pool.cli.table import Cell, Column, lay_out, line

from .frame import Frame, GpuRow, ServerState
from .sparkline import UNKNOWN, bar, sparkline

_HEADING = "bold white on grey23"
_STALE = "dim"
# Every name begins with these, and the header says which GPUs are simulated.
_SAID_ANYWAY = ("Simulated ", "NVIDIA ", "GeForce ")
_NO_LIMIT = 1000

_GPU_COLUMNS = (
    Column("GPU", 3, 24),
    Column("NAME", 8, 22, rank=4),
    Column("STATE", 6, 18),
    Column("MEMORY", 6, 16, rank=1),
    Column("", 4, 13, rank=1, is_number=True, is_stepped=True),
    Column("UTIL", 5, 12, rank=2),
    Column("", 4, 4, rank=2, is_number=True),
    Column("HISTORY", 7, 24, rank=5),
    Column("TEMP", 4, 5, rank=6, is_number=True),
    Column("POWER", 5, 9, rank=7, is_number=True, is_stepped=True),
    Column("HELD BY", 14, _NO_LIMIT, rank=3),
)
_STATE, _MEMORY, _POWER = 2, 4, 9
_LEASE_COLUMNS = (
    Column("LEASES", 6, 28),
    Column("GPUS", 4, 30),
    Column("SINCE", 5, 8, rank=1, is_number=True),
    Column("ID", 8, 36, rank=5),
    Column("FROM", 6, 24, rank=6),
    Column("TERMS", 5, 36, rank=3),
    Column("RUNS", 8, _NO_LIMIT, rank=2),
)
_QUEUE_COLUMNS = (
    Column("QUEUE", 6, 28),
    Column("SINCE", 5, 8, rank=2, is_number=True),
    Column("PRIO", 4, 6, rank=4),
    Column("START", 6, 10, rank=1),
    Column("WANTS", 8, 40, rank=3),
    Column("COMMAND", 7, 30, rank=1),
    Column("WAITS BECAUSE", 16, _NO_LIMIT),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and so many lines. They are drawn when they are asked for: of a thousand GPUs a screen shows a few.

    The last line may stand for `unlisted` requests, which were not asked for one by one.
    """

    noun: str
    heading: Text
    size: int
    draw_line: Callable[[int], Text]
    unlisted: int = 0

    def below(self, end: int) -> int:
        return self.size - end + max(self.unlisted - 1, 0) if end < self.size else 0

    def lines(self, start: int = 0, end: int | None = None) -> list[Text]:
        return [self.draw_line(index) for index in range(start, self.size if end is None else end)]


def gpu_section(frame: Frame, width: int) -> Section:
    found = [row for server in frame.distinct for row in server.gpus]
    columns = list(_GPU_COLUMNS)
    # A state is one to three words, and is not cut.
    longest_state = max([columns[_STATE].least, *(cell_len(_state(row)) for row in found)])
    columns[_STATE] = replace(columns[_STATE], least=min(longest_state, columns[_STATE].most))
    for index, texts in ((_MEMORY, _memory_texts), (_POWER, _power_texts)):
        longest = max([columns[index].least, *(len(texts(row)[0]) for row in found)])
        columns[index] = replace(columns[index], most=longest)
    rows = []
    for server in frame.distinct:
        leases = {lease.id: lease for lease in server.report.leases} if server.report else {}
        rows += [_gpu_cells(row, server, leases, columns, frame.at.timestamp()) for row in server.gpus]
    return _section("GPUs", columns, rows, [row.is_stale for row in found], width)


def lease_section(frame: Frame, width: int) -> Section:
    found = [(server, lease) for server in frame.distinct if server.report for lease in server.report.leases]
    columns = _counted(_LEASE_COLUMNS, len(found), frame)
    rows = [_lease_cells(lease, frame.at.timestamp()) for _, lease in found]
    return _section("leases", columns, rows, [server.is_stale for server, _ in found], width)


def queue_section(frame: Frame, width: int, *, is_whole: bool) -> Section:
    """A line for each waiting request. `is_whole`: the whole reason is shown, on as many lines as it takes."""
    found = [(server, lease) for server in frame.distinct if server.report for lease in server.report.queue]
    length = sum(server.report.queue_length for server in frame.distinct if server.report)
    columns = _counted(_QUEUE_COLUMNS, length, frame)
    rows = [_queue_cells(lease, frame.at.timestamp(), is_one=len(frame.servers) == 1) for _, lease in found]
    stale = [server.is_stale for server, _ in found]
    section = _section("waiting", columns, rows, stale, width)
    lines: list[Text] = []
    for text, row, is_old in zip(section.lines(), rows, stale, strict=True):
        why = row[-1]
        parts = _wrapped(text, why, width) if is_whole and isinstance(why, Text) and text.cell_len > width else [text]
        for part in parts if is_old else ():
            part.stylize(_STALE)
        lines += parts
    unlisted = max(length - len(found), 0)
    if unlisted:
        lines.append(Text(f" … and {unlisted} more behind them; `gpu-pool leases --state queued` lists all", "dim"))
    return Section("waiting", section.heading, len(lines), lines.__getitem__, unlisted)


def _wrapped(text: Text, last: Text, width: int) -> list[Text]:
    """A line whose last cell continues below where it began; unchanged where that cell is not shown."""
    if not text.plain.endswith(last.plain):
        return [text]
    before = text[: len(text) - len(last)]
    indent = before.cell_len
    first, *rest = textwrap.wrap(last.plain, max(width - indent, 10)) or [""]
    return [before.append(first), *(Text(" " * indent + part) for part in rest)]


def _counted(columns: Sequence[Column], number: int, frame: Frame) -> list[Column]:
    """The same, with the number of rows in the first title."""
    is_known = any(server.report is not None for server in frame.servers)
    return [replace(columns[0], title=f"{columns[0].title} ({number if is_known else UNKNOWN})"), *columns[1:]]


def _percent(percent: float | None) -> str:
    return UNKNOWN if percent is None else f"{percent:.0f}%"


def _short_name(name: str | None) -> str:
    if name is None:
        return UNKNOWN
    for word in _SAID_ANYWAY:
        name = name.removeprefix(word)
    return name


def _gpu_cells(
    row: GpuRow,
    server: ServerState,
    leases: Mapping[str, LeaseReport],
    columns: Sequence[Column],
    now: float,
) -> list[Cell]:
    threshold_percent = server.report.view.thresholds.memory_percent if server.report else None
    holders = [leases[lease_id] for lease_id in row.report.view.leases if lease_id in leases]
    bookings = [each for each in (server.report.bookings if server.report else ()) if each.has(row.report.view)]
    gpu, memory_percent = row.report.view, row.report.memory_percent
    is_over = memory_percent is not None and memory_percent >= (threshold_percent or 100.0)
    memory_style = "red" if is_over else "cyan"
    heat_c = row.temperature_c
    return [
        Text(row.report.id, "bold"),
        Text(_short_name(gpu.name)),
        Text(_state(row), STATE_STYLES.get(gpu.state, "")),
        lambda width: bar(memory_percent, width, style=memory_style, mark_percent=threshold_percent),
        _stepped(_memory_texts(row), columns[_MEMORY]),
        lambda width: bar(gpu.utilization_percent, width, style="green"),
        Text(_percent(gpu.utilization_percent)),
        lambda width: Text(sparkline(row.utilization_percents, width), "green"),
        Text(UNKNOWN) if heat_c is None else Text(f"{heat_c:.0f}°C", "bold red" if heat_c >= 85 else ""),
        _stepped(_power_texts(row), columns[_POWER]),
        _held_by(row, holders, bookings, now),
    ]


def _state(row: GpuRow) -> str:
    """The state in words, in the past tense where its server does not answer."""
    word = row.report.view.state.replace("_", " ")
    return f"was {word}" if row.is_stale else word


def _memory_texts(row: GpuRow) -> tuple[str, str]:
    short = _percent(row.report.memory_percent)
    used_mb, total_mb = row.report.view.memory_used_mb, row.report.view.memory_total_mb
    return (short if used_mb is None or total_mb is None else f"{used_mb / 1024:.1f}/{total_mb / 1024:.0f}G"), short


def _power_texts(row: GpuRow) -> tuple[str, str]:
    short = UNKNOWN if row.power_draw_w is None else f"{row.power_draw_w:.0f}W"
    return (f"{short.removesuffix('W')}/{row.power_limit_w:.0f}W" if row.power_limit_w else short), short


def _stepped(texts: tuple[str, str], column: Column) -> Callable[[int], Text]:
    """The long form where every row of the column has room for it."""
    return lambda width: Text(texts[0] if width >= column.most else texts[1])


def _held_by(row: GpuRow, holders: Sequence[LeaseReport], bookings: Sequence[BookingReport], now: float) -> Text:
    gpu = row.report.view
    if gpu.state not in SAID_BY_HOLDERS:
        holders, text = (), Text(gpu.reason or "the server does not say why", "italic")
    else:
        text = Text()
    for number, lease in enumerate(holders):
        holding = show_holding(lease, now, lease.command).removeprefix(lease.holder)
        text.append("; " if number else "").append(lease.holder, "bold").append(holding, "dim")
    for booking in bookings if gpu.state in SAID_BY_HOLDERS else ():
        text.append("; " if text else "").append(booking.in_words(now), "italic")
    for process in show_outsiders(gpu):
        text.append("; " if text else "").append(f"outside the pool: {process}", "italic")
    return text


def _lease_cells(lease: LeaseReport, now: float) -> list[Cell]:
    view, ids = lease.view, lease.gpu_ids
    where = " ".join(part for part in (view.host, f"pid {view.pid}" if view.pid is not None else None) if part)
    runs = lease.command if view.state == "active" else f"{view.state}: {view.reason or UNKNOWN}"
    return [
        Text(lease.holder, "bold"),
        Text(short_ids(ids) or UNKNOWN),
        Text(show_since(lease.since_at, now)),
        Text(lease.id, "dim"),
        Text(where),
        Text(", ".join(show_terms(view, now)), "bold red" if view.warning else ""),
        Text(runs or ""),
    ]


def _queue_cells(lease: LeaseReport, now: float, *, is_one: bool) -> list[Cell]:
    position = UNKNOWN if lease.view.position is None else str(lease.view.position)
    return [
        Text(f"{position} " if is_one else f"{lease.endpoint} {position} ").append(lease.holder, "bold"),
        Text(show_since(lease.requested_at, now)),
        Text(str(lease.view.priority) if lease.view.priority else ""),
        Text(short_start(lease.view, now)),
        Text(lease.wants),
        Text(lease.command or ""),
        Text(lease.why or "the server does not say why"),
    ]


def _section(
    noun: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], is_stale: Sequence[bool], width: int
) -> Section:
    widths = lay_out(columns, rows, width - 1)
    heading = Text(" ").append_text(line(columns, widths, [Text(column.title) for column in columns]))
    heading.pad_right(max(width - heading.cell_len, 0))
    heading.stylize(_HEADING)

    def draw_line(index: int) -> Text:
        text = Text(" ").append_text(line(columns, widths, rows[index]))
        if is_stale[index]:
            text.stylize(_STALE)
        return text

    return Section(noun, heading, len(rows), draw_line)
