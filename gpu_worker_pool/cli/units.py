"""Memory, durations and times, as people write and read them."""

from __future__ import annotations

import typer

from gpu_worker_pool import amounts
from gpu_worker_pool.amounts import parse_span


def parse_memory_mb(text: str | float) -> float:
    """The same as in Python, as a value on the command line."""
    try:
        return amounts.parse_memory_mb(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_duration_s(text: str | float) -> float:
    """Read `90`, `90s`, `15m`, `1h`, `1h30m`, `2d`; a number alone is in seconds."""
    try:
        seconds = parse_span(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90s, 15m, 1h30m, 2d or 90 (in seconds)") from None
    if not 0 <= seconds <= 1e9:
        raise typer.BadParameter(f"{text!r} is too long; it must be at most a billion seconds")
    return seconds


def show_duration(seconds: float) -> str:
    """A duration in its two largest units: `42s`, `5m 12s`, `3h 5m`, `2d 4h`."""
    left = max(int(seconds), 0)
    if left < 60:
        return f"{left}s"
    units = [(left // 86_400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next(index for index, (number, _) in enumerate(units) if number)
    return " ".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number)


def show_memory(memory_mb: float) -> str:
    """Memory in GiB, `9.2 GiB`; below one GiB in MiB, `800 MiB`."""
    return f"{memory_mb / 1024:.1f} GiB" if memory_mb >= 1024 else f"{memory_mb:.0f} MiB"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
