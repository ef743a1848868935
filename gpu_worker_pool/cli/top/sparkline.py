"""Percentages drawn in a line of text: a bar for one, a sparkline for the last ones. Neither shows unknown as zero."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

UNKNOWN = "?"
# A reading that could not be taken, among others that could.
GAP = "·"
# The highest leaves a gap to the line above, so that two GPUs do not run together.
_LEVELS = "▁▂▃▄▅▆▇"
_FULL, _HALF, _EMPTY = "━╾─"
MARK, _MARK_IN_FULL = "┼╋"
_GROUND = "bright_black"


def sparkline(percents: Sequence[float | None], width: int) -> str:
    """The last `width` readings, the newest at the right, always on a scale of 0 to 100; the left may be empty."""
    if width <= 0:
        return ""
    return "".join(GAP if percent is None else _level(percent) for percent in percents[-width:]).rjust(width)


def bar(percent: float | None, width: int, *, style: str, mark_percent: float | None = None) -> Text:
    """A bar exact to half a cell, with a mark at the threshold, readable without colours. Unknown is a `?`."""
    if width <= 0:
        return Text()
    if percent is None:
        return Text(UNKNOWN.center(width).rstrip(), "dim")
    halves = round(min(max(percent, 0.0), 100.0) / 100 * width * 2)
    if percent > 0:
        halves = max(halves, 1)  # a little is not nothing
    full, half = divmod(halves, 2)
    text = Text().append(_FULL * full + _HALF * half, style).append(_EMPTY * (width - full - half), _GROUND)
    if mark_percent is None or not 0 < mark_percent < 100:
        return text
    mark = min(int(mark_percent / 100 * width), width - 1)
    sign = Text(_MARK_IN_FULL, style) if mark < full else Text(MARK, "white")
    return Text().append_text(text[:mark]).append_text(sign).append_text(text[mark + 1 :])


def _level(percent: float) -> str:
    share = min(max(percent, 0.0), 100.0) / 100
    return _LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)]
