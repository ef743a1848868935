"""What `gpu-pool top` shows: what is known of the servers as lines of text, for a screen of any size. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group
from rich.text import Text

from gpu_worker_pool.cli.commands.status import STATE_STYLES
from gpu_worker_pool.cli.pools.report import PoolReport
from gpu_worker_pool.cli.units import count, show_duration
from gpu_worker_pool.wire.same_server import same_pool

from .frame import Frame, ServerState
from .sections import Section, gpu_section, lease_section, queue_section
from .sparkline import MARK, UNKNOWN

GPUS, LEASES, QUEUE = SECTIONS = ("gpus", "leases", "queue")
# The words that the totals always have; others only where there are such GPUs.
_ALWAYS_COUNTED = ("free", "leased", "busy")
_COUNTED_AS = {"shared": "leased"}


@dataclass(frozen=True, slots=True)
class Scroll:
    section: str = GPUS
    offsets: Mapping[str, int] = field(default_factory=dict)

    def moved(self, by: int) -> Scroll:
        """The section that has the keys, moved by so many rows. Drawing keeps it within its bounds."""
        return replace(self, offsets={**self.offsets, self.section: max(self.offsets.get(self.section, 0) + by, 0)})

    def next_section(self) -> Scroll:
        return replace(self, section=SECTIONS[(SECTIONS.index(self.section) + 1) % len(SECTIONS)])


NOT_SCROLLED = Scroll()


@dataclass(frozen=True, slots=True)
class Picture:
    """A frame as drawn: its lines, how far it is scrolled, and how many rows a page has."""

    lines: list[Text]
    scroll: Scroll
    page_rows: int = 1

    def __rich__(self) -> Group:
        return Group(*self.lines)


def draw_all(frame: Frame, width: int, *, is_whole: bool) -> Picture:
    """Everything, one section below the other, and nothing about keys. `is_whole`: no line is cut off, however long."""
    queue = queue_section(frame, width, is_whole=not is_whole)
    lines = _header(frame, width, None)
    for section in (gpu_section(frame, width), lease_section(frame, width), queue):
        lines += [Text(), section.heading, *section.lines()]
    for text in lines:
        text.rstrip()
        text.no_wrap, text.overflow = True, "ignore"
        if not is_whole:
            text.truncate(width, overflow="ellipsis")
    return Picture(lines, NOT_SCROLLED)


def draw(frame: Frame, width: int, height: int, scroll: Scroll | None = None) -> Picture:
    """Draw for a screen of this size. Lines that do not fit are counted, and can be scrolled to."""
    scroll = scroll or NOT_SCROLLED
    head = _header(frame, width, height)
    room = height - len(head) - 1
    sections = [gpu_section(frame, width), lease_section(frame, width), queue_section(frame, width, is_whole=False)]
    if sum(section.size + 1 for section in sections) < room:
        whole = queue_section(frame, width, is_whole=True)
        if sections[0].size + sections[1].size + whole.size + len(sections) <= room:
            sections[2] = whole
    given = _share_out([section.size for section in sections], room - len(sections))
    spare = room - sum(given) - len(sections)
    lines, offsets, page_rows = [*head], {}, 1
    for name, section, rows in zip(SECTIONS, sections, given, strict=True):
        start, end = _window(section.size, rows, scroll.offsets.get(name, 0))
        offsets[name] = start
        if name == scroll.section:
            page_rows = max(end - start, 1)
        if spare >= len(SECTIONS):
            lines.append(Text())
        lines += [section.heading, *section.lines(start, end)]
        if rows and end - start < section.size:
            lines.append(_more(section, start, end, has_keys=name == scroll.section))
    lines = lines[: max(height - 1, 0)]
    lines += [Text()] * (height - 1 - len(lines))
    shown = [*lines, _footer(frame, width)][-height:] if height > 0 else []
    for text in shown:
        text.truncate(width, overflow="ellipsis")
    return Picture(shown, Scroll(scroll.section, offsets), page_rows)


def _share_out(needs: Sequence[int], room: int) -> list[int]:
    """The rows of each section. Where they do not all fit, half are for the GPUs and a quarter each for leases and
    queue; rows that one does not need go to the others, to the GPUs first and to the queue before the leases.
    """
    room = max(room, 0)
    gpus, leases, queue = range(3)
    shares = {gpus: room - 2 * (room // 4), leases: room // 4, queue: room // 4}
    given = [min(need, shares[index]) for index, need in enumerate(needs)]
    for index in (gpus, queue, leases):
        given[index] += min(needs[index] - given[index], room - sum(given))
    return given


def _window(total: int, room: int, offset: int) -> tuple[int, int]:
    """Which rows are shown. Where not all are, one row is left for saying so."""
    if total <= room:
        return 0, total
    shown = max(room - 1, 0)
    start = min(offset, total - shown)
    return start, start + shown


def _header(frame: Frame, width: int, height: int | None) -> list[Text]:
    text = Text().append(" gpu-pool top ", "bold black on green").append("  ").append_text(_totals(frame))
    clock = f"{'paused at ' if frame.is_paused else ''}{frame.at:%H:%M:%S}"
    text.truncate(max(width - len(clock) - 1, 0), overflow="ellipsis")
    text.append(" " * max(width - text.cell_len - len(clock), 0))
    text.append(clock, "bold reverse" if frame.is_paused else "bold")
    most = len(frame.servers) if height is None else max(height // 4, 1)
    return [text, *_server_lines(frame, most)]


def _totals(frame: Frame) -> Text:
    """GPUs by state, and how many requests wait. A GPU of a server that does not answer is counted as not known."""
    if all(server.report is None for server in frame.servers):
        return Text(f"GPUs {UNKNOWN}   queue {UNKNOWN}", "bold")
    rows = [row for server in frame.distinct for row in server.gpus]
    counts = Counter(_COUNTED_AS.get(row.report.view.state, row.report.view.state) for row in rows if not row.is_stale)
    text = Text().append(f"{count(len(rows), 'GPU')}: ", "bold")
    for word in [*_ALWAYS_COUNTED, *sorted(counts.keys() - set(_ALWAYS_COUNTED))]:
        style = STATE_STYLES.get(word, "") if counts[word] else "dim"
        text.append(f"{counts[word]} {word.replace('_', ' ')}", style).append("  ")
    if stale := sum(row.is_stale for row in rows):
        text.append(f"{stale} not known", "bold red").append("  ")
    up = [server.report for server in frame.distinct if server.report and server.is_up]
    return text.append(f" queue {sum(report.queue_length for report in up) if up else UNKNOWN}", "bold")


def _server_lines(frame: Frame, most: int) -> list[Text]:
    """A line for each; where there are too many, those that do not answer come first."""
    servers = list(frame.servers)
    if len(servers) <= most:
        return [_server_line(server, is_only=len(servers) == 1) for server in servers]
    servers.sort(key=lambda server: not server.is_stale)
    shown, rest = servers[: most - 1], servers[most - 1 :]
    down = sum(server.is_stale for server in rest)
    said = f"… {len(rest)} more servers, {'all of them answer' if not down else f'{down} of them do not answer'}"
    return [*(_server_line(server, is_only=False) for server in shown), Text(f" {said}", "bold red" if down else "dim")]


def _server_line(server: ServerState, *, is_only: bool) -> Text:
    sign, style = ("●", "green") if server.is_up else ("✗", "bold red") if server.error else ("○", "yellow")
    text = Text().append(f" {sign} ", style)
    if not is_only:
        text.append(server.endpoint, "bold").append("  ")
    text.append(server.url)
    if server.error is None and server.report is not None:
        if server.same_as is not None:
            return text.append(f"  {same_pool(server.same_as, server.report.view.node)}", "yellow")
        if server.is_up:
            return text.append_text(_about(server, server.report, is_only=is_only))
    if server.age_s is not None:
        text.append(f"  no answer, data {show_duration(server.age_s)} old", "bold red")
    elif server.error is not None:
        text.append("  no answer", "bold red")
    else:
        text.append("  asking …", "yellow")
    return text.append(f": {server.error}" if server.error else "", "red")


def _about(server: ServerState, report: PoolReport, *, is_only: bool) -> Text:
    text = Text(f"  {report.view.node}" if report.view.node else "")
    if not is_only:
        text.append(f"  {count(len(server.gpus), 'GPU')}, {report.free} free, queue {report.queue_length}")
    source = "simulated GPUs" if report.is_simulated else f"GPUs seen by {report.view.source or UNKNOWN}"
    text.append(f"  {source}", "magenta" if report.is_simulated else "")
    if not report.has_leases:
        return text.append("  statistics only, no leases", "yellow")
    if report.view.can_grant is False:
        return text.append(f"  grants nothing: {report.view.trouble or 'it does not say why'}", "bold red")
    threshold_percent = report.view.thresholds.memory_percent
    mark = f"memory threshold {UNKNOWN if threshold_percent is None else f'{threshold_percent:g} %'}"
    return text.append(f"  {MARK} {mark}", "dim")


def _footer(frame: Frame, width: int) -> Text:
    keys = {"q": "quit", "p": "go on" if frame.is_paused else "pause", "↑↓ PgUp PgDn": "scroll", "Tab": "section"}
    text = Text()
    for key, what in keys.items():
        text.append(f" {key} ", "bold black on cyan").append(f" {what}  ")
    every = f"every {frame.interval_s:g} s"
    return text.append(every.rjust(max(width - text.cell_len, len(every))), "dim")


def _more(section: Section, start: int, end: int, *, has_keys: bool) -> Text:
    above, below = start, section.below(end)
    parts = [f"{above} more above"] if above else []
    parts += [f"{below} more {section.noun}{' below' if above else ''}"] if below or not above else []
    return Text(f" … {', '.join(parts)}{' (↑↓ PgUp PgDn)' if has_keys else ' (Tab, then ↑↓)'}", "bold yellow")
