"""Options that a submitted script brings itself: lines `#GPU --gpus 2 --time 4h` among the comments at its beginning."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from gpu_worker_pool.failure import USAGE, Failure

_MARK: Final = "#GPU"
_READ_BYTES: Final = 64 << 10


def options_in(command: Sequence[str]) -> tuple[str, list[str]]:
    """The script of a command, and the words of its #GPU lines. The script is the first word, or the first one behind a program
    such as `bash` that is not an option.
    """
    behind = next((word for word in command[1:] if not word.startswith("-")), None)
    for path in (command[0], behind) if command else ():
        words = [] if path is None else _words_in(path)
        if path is not None and words:
            return path, words
    return "", []


def _words_in(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as the user names it
            text = file.read(_READ_BYTES).decode()
    except (OSError, ValueError):
        return []  # it is not there, or not a text
    words: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        mark, _, rest = stripped.partition(" ")
        if mark == _MARK:
            try:
                words += shlex.split(rest)
            except ValueError as error:
                raise Failure(f"{path}, line {number}: {error}", USAGE) from None
    return words
