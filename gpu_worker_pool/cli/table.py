"""Tables without lines: as narrow as can be, and each row a line for whoever reads them through a pipe."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Final

from rich.console import Console
from rich.table import Table

# Wider than any row: a reader at the other end of a pipe wants all of it.
_UNBOUNDED_CELLS: Final = 100_000
_MOST_ON_TERMINAL: Final = 60


def make_table(*headings: str, whole: Collection[str] = ()) -> Table:
    """A table to be filled. Where there is no room, the columns named in `whole` are the last to be broken into lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading in whole, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """To fit a terminal; elsewhere with nothing broken or cut off, and no blanks at the ends of its lines."""
    if console.is_terminal:
        console.print(table)
        return
    whole = Console(file=io.StringIO(), width=_UNBOUNDED_CELLS, color_system=None)
    with whole.capture() as captured:
        whole.print(table)
    for line in captured.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def cut(console: Console, text: str) -> str:
    """On a terminal a long text, such as a command, by its beginning; elsewhere all of it."""
    if not console.is_terminal or len(text) <= _MOST_ON_TERMINAL:
        return text
    return f"{text[: _MOST_ON_TERMINAL - 3]}..."
