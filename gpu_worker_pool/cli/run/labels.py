"""The labels by which others recognize a command in `status`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Final

from gpu_worker_pool.wire.bounds import is_printable

_MAX_LABEL: Final = 200


def command_label(command: Sequence[str]) -> str:
    """Program and script, `python train.py`. Options are left out: there may be secrets in them."""
    words = [PurePath(word).name for word in command[:2] if not word.startswith("-")]
    return label_text(" ".join(words if len(words) == len(command[:2]) else words[:1]))


def label_text(text: str) -> str:
    """`text` as a server accepts it in a label: each run of characters that it refuses becomes a blank."""
    # A name on the command line need not be UTF-8.
    readable = text.encode("utf-8", "replace").decode("utf-8")
    runs = groupby(readable, is_printable)
    return "".join("".join(run) if is_accepted else " " for is_accepted, run in runs)[:_MAX_LABEL].strip()
