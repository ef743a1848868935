"""A word and a long text beside it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_beside(console: Console, word: Text, text: Text) -> None:
    """On a terminal a long text wraps beside the word; elsewhere it is one line, so that it can be searched."""
    if not console.is_terminal:
        console.print(word + text)
        return
    row = Table.grid()
    row.add_column(min_width=word.cell_len, max_width=word.cell_len, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(word, text)
    console.print(row)
