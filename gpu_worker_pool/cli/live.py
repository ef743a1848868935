"""Lines on a terminal that are drawn again in place: what a command waits for, and a whole screen that follows a pool."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from .output import Console, Text, complain, err, wrap

_CLEAR_BELOW: Final = "\x1b[J"
_ALTERNATE, _NORMAL = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Live:
    """Lines at the end of what was printed. Each `show` draws over the one before; `close` removes them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn = 0

    def show(self, lines: Sequence[str | Text]) -> None:
        width = max(self._console.width - 1, 1)
        shown = []
        for line in lines:
            text = line if isinstance(line, Text) else Text(line)
            is_short = len(text.plain) <= width
            shown += [text] if is_short else [Text(part) for part in wrap(text.plain, width)]
        shown = shown[: max(self._console.height - 1, 1)]
        drawn = "\n".join(text.rendered(has_colours=self._console.has_colours) for text in shown)
        self._console.write(f"{self._back()}{drawn}")
        self._console.file.flush()
        self._drawn = len(shown)

    def close(self) -> None:
        if self._drawn:
            self._console.write(self._back())
            self._console.file.flush()
            self._drawn = 0

    def _back(self) -> str:
        """Move to the beginning of what was drawn, and clear it."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        return f"\r{up}{_CLEAR_BELOW}" if self._drawn else ""


class StatusLine:
    """One line about what a command waits for: on a terminal it is kept up to date, elsewhere it is said once."""

    def __init__(self) -> None:
        console = err()
        self._live = Live(console) if console.is_terminal else None
        self._was_said = False

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def show(self, line: str) -> None:
        if self._live is not None:
            self._live.show([line])
        elif not self._was_said:
            complain(line)
            self._was_said = True

    def close(self) -> None:
        if self._live is not None:
            self._live.close()


def draw_until_quit(console: Console, draw: Callable[[], Sequence[str]], interval_s: float) -> None:
    """Show on the whole screen what `draw` returns, again and again, until `q` or Ctrl-C."""
    with _screen(console), _keys() as is_quit:
        ends = False
        while not ends:
            lines = draw()
            room = console.height - 1
            hidden = [] if len(lines) <= room else [f"... {len(lines) - room + 1} more lines: make the window larger"]
            shown = [*lines[: room - len(hidden)], *hidden]
            console.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + _CLEAR_BELOW)
            console.file.flush()
            ends = is_quit(interval_s)


@contextmanager
def _screen(console: Console) -> Iterator[None]:
    console.write(_ALTERNATE)
    try:
        yield
    finally:
        console.write(_NORMAL)
        console.file.flush()


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits for some seconds; whether `q` was typed meanwhile. The terminal is left as it was."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def is_quit(seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while (left_s := ends_at - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left_s)[0] and sys.stdin.read(1) in {"q", "Q", ""}:
                return True
        return False

    try:
        yield is_quit
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
