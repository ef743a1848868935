"""One line about what a command waits for: on a terminal it is kept up to date, elsewhere it is said once."""

from __future__ import annotations

from rich.text import Text

from .output import complain, err


class StatusLine:
    def __init__(self) -> None:
        console = err()
        self._live = console.status("") if console.is_terminal else None
        self._was_said = False

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line))
            self._live.start()
        elif not self._was_said:
            complain(line)
            self._was_said = True

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
