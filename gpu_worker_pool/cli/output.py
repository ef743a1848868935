"""The output of commands: results to standard output, everything else to standard error; colours only on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TextIO

from gpu_worker_pool.wire.reader import plain as plain  # noqa: PLC0414 - for all commands

_CODES: Final = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36"
}  # fmt: skip
_DEFAULT_WIDTH: Final = 80


class OutputClosed(Exception):  # noqa: N818 - what happened
    """Standard output cannot be written: its reader is gone, or the disk is full."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Text:
    """A text, parts of which have a style: `bold`, `dim`, a colour, or several of these. One that `is_line` is cut where
    there is no room for it, and not wrapped.
    """

    def __init__(self, text: str = "", style: str = "", *, is_line: bool = False) -> None:
        self.parts = [(text, style)] if text else []
        self.is_line = is_line

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str]) -> Self:
        made = cls()
        made.parts = [(part, "") if isinstance(part, str) else part for part in parts]
        return made

    def append(self, text: str | Text, style: str = "") -> Self:
        self.parts += text.parts if isinstance(text, Text) else [(text, style)]
        return self

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)

    def rendered(self, *, has_colours: bool) -> str:
        if not has_colours:
            return self.plain
        return "".join(styled(text, style) for text, style in self.parts)


def styled(text: str, style: str) -> str:
    """The text with the codes of its style, for a terminal."""
    if not style or not text:
        return text
    return f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m"


def cell_len(text: str) -> int:
    """How many columns a terminal needs for this."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most this width, broken between words; a word that is longer than a line is broken too."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
            continue
        if lines[-1] or len(lines) > 1:
            lines.append("")
        rest = word
        while cell_len(rest) > width:
            taken = _beginning(rest, width)
            lines[-1] = rest[:taken]
            lines.append("")
            rest = rest[taken:]
        lines[-1] = rest
    return lines


def cut_to(text: str, width: int) -> str:
    """The beginning of a text that is too long for one line."""
    return text if cell_len(text) <= width else f"{text[: _beginning(text, max(width - 3, 1))]}..."


def _beginning(text: str, width: int) -> int:
    """How many characters of the text fit."""
    taken = 1
    while taken < len(text) and cell_len(text[: taken + 1]) <= width:
        taken += 1
    return taken


class Console:
    """Where a command prints. In a pipe nothing is cut or wrapped: its reader needs whole lines."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        is_terminal: bool | None = None,
        width: int | None = None,
        has_colours: bool | None = None,
    ) -> None:
        self.file = sys.stdout if file is None else file
        self.is_terminal = self.file.isatty() if is_terminal is None else is_terminal
        self._width = width
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.has_colours = (self.is_terminal and not is_plain) if has_colours is None else has_colours

    @property
    def width(self) -> int:
        return self._width or asked_width() or self._size()[0]

    @property
    def height(self) -> int:
        return self._size()[1]

    @property
    def is_ascii(self) -> bool:
        """Whether it can show nothing but ASCII."""
        return not (self.file.encoding or "utf-8").lower().startswith("utf")

    def _size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return _DEFAULT_WIDTH, 24
        return columns or _DEFAULT_WIDTH, lines or 24

    def print(self, text: str | Text = "", style: str = "") -> None:
        """Print a line; on a terminal a long one is broken between words."""
        shown = Text(text, style) if isinstance(text, str) else text
        if self.is_terminal and cell_len(shown.plain) > self.width:
            lines = [cut_to(shown.plain, self.width)] if shown.is_line else wrap(shown.plain, self.width)
            style = style or (shown.parts[0][1] if shown.is_line else "")
            self.write("".join(f"{styled(line, style) if self.has_colours else line}\n" for line in lines))
        else:
            self.write(f"{shown.rendered(has_colours=self.has_colours)}\n")

    def write(self, text: str) -> None:
        try:
            self.file.write(text)
            if text.endswith("\n"):
                self.file.flush()
        except OSError as error:
            raise OutputClosed(error) from error


def out() -> Console:
    """The console for results."""
    return Console(sys.stdout)


def err() -> Console:
    return Console(sys.stderr)


def asked_width() -> int | None:
    """The width that COLUMNS asks for; shells do not set it for the programs they start."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def is_output_broken() -> bool:
    """Whether the reader of standard output or standard error is gone: a pipe is closed, a terminal hung up."""
    outputs = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or not a file
            outputs.register(stream.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in outputs.poll(0))


def stop_printing() -> None:
    """Discard standard output from now on, because it cannot be written (`head` has had enough, say)."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """Print one object of our own on one line. docs/how-to/scripts.md shows its schema, by name and version: within a version, keys
    are added, but never removed or given another meaning.
    """
    print_body({"schema": f"gpu-pool/{command}/1", **data})


def print_body(body: Any) -> None:
    """Print what a server answered, on one line."""
    out().write(f"{json.dumps(body)}\n")


def complain(message: str) -> None:
    """Print a line on standard error. The message may quote a server."""
    tell(f"gpu-pool: {plain(message)}")


def tell(line: str) -> None:
    """Print a line on standard error. Where that cannot be written (its reader is gone, the disk is full), no more is printed
    there: a command ends as it would have ended.
    """
    try:
        err().print(line)
    except OutputClosed:
        # What is left in its buffer must not be written again at the end. The descriptor stays: it is that of a command, too.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the end


def confirm(question: str) -> bool:
    """Ask a person at the terminal; no is the default."""
    print(f"{plain(question)} [y/N]: ", end="", file=sys.stderr, flush=True)  # noqa: T201
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def pass_on_warnings(say: Callable[[str], None]) -> None:
    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(WarningHandler(say))
    logger.propagate = False


class WarningHandler(logging.Handler):
    """Passes warnings on, but not log records of events: the command reports those itself."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "event"):
            self._say(record.getMessage())
