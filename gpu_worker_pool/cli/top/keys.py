"""Keys as they are pressed, without waiting for Enter."""

from __future__ import annotations

import os
import re
import termios
import tty
from contextlib import suppress
from typing import Final

UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
HOME: Final = "home"
END: Final = "end"
TAB: Final = "tab"

# What terminals send, in both of their modes.
_NAMES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), UP),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), DOWN),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~"), HOME),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~"), END),
    "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN,
    "\t": TAB,
}
_KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys_in(data: bytes) -> list[str]:
    """The keys in what a terminal sent: named ones by name, others as their character, unknown sequences left out."""
    found = _KEY.findall(data.decode("utf-8", "replace"))
    return [_NAMES.get(key, key) for key in found if key in _NAMES or len(key) == 1]


class Keyboard:
    """Between start and stop the terminal passes on each key at once, without echo. Ctrl-C keeps its meaning."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._before = termios.tcgetattr(descriptor)

    def start(self) -> None:
        self._before = termios.tcgetattr(self.descriptor)
        tty.setcbreak(self.descriptor, termios.TCSANOW)

    def stop(self) -> None:
        with suppress(termios.error):  # the terminal is gone, and cannot be restored
            termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self._before)

    def read(self) -> list[str] | None:
        """What was pressed; waits if nothing was. None where the terminal is gone."""
        try:
            data = os.read(self.descriptor, 1024)
        except OSError:
            return None
        return keys_in(data) if data else None
