"""The name of a command, or of this program, for others to see: never an option or a value, which may be secrets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import PurePath
from typing import Final

from gpu_worker_pool.core.model.request import TASK_LABELS
from gpu_worker_pool.wire.bounds import MAX_LABELS, MAX_LABELS_BYTES, is_printable

_MAX_LABEL: Final = 200
_SCRIPTS: Final = (".py", ".sh")


def command_label(command: Sequence[str]) -> str:
    """The first word that ends in .py or .sh, or the word after -m, else the program."""
    for before, word in pairwise(["", *command]):
        is_option_or_code = word.startswith("-") or "=" in word or any(map(str.isspace, word))
        if not is_option_or_code and (before == "-m" or word.endswith(_SCRIPTS)):
            return label_text(PurePath(word).name)
    program = command[0] if command else ""
    return "" if "=" in program else label_text(PurePath(program).name)


def label_text(text: str) -> str:
    """`text` as a server accepts it in a label: each run of characters that it refuses becomes a blank."""
    # A name on the command line need not be UTF-8.
    readable = text.encode("utf-8", "replace").decode("utf-8")
    runs = groupby(readable, is_printable)
    return "".join("".join(run) if is_accepted else " " for is_accepted, run in runs)[:_MAX_LABEL].strip()


def ipython_shell() -> object | None:
    """The shell of IPython that runs this process; None if there is none."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: object | None = get_ipython() if callable(get_ipython) else None
    return shell


def program_label(argv: Sequence[str], module: str | None = None, shell: object | None = None) -> str:
    """The name of a program by its `sys.argv`, the module that it was started as, and its IPython shell.

    `python` for a program that is typed in or comes with -c. A shell in a terminal has a command line of its own.
    """
    if shell is not None and "Terminal" not in type(shell).__name__:
        return "notebook"
    if module is not None:
        return label_text(module.removesuffix(".__main__"))
    script = PurePath(argv[0]).name if argv else ""
    return "python" if script in {"", "-", "-c"} or "=" in script else label_text(script)


def with_own_label(labels: Mapping[str, str]) -> dict[str, str]:
    """These labels with that of this program, unless they name a task or there is no room for another label."""
    label = program_label(sys.argv, _started_module(), ipython_shell())
    size = sum(len(str(text).encode("utf-8", "replace")) for item in labels.items() for text in item)
    has_room = len(labels) < MAX_LABELS and size + len(f"command{label}".encode()) <= MAX_LABELS_BYTES
    if not has_room or any(labels.get(name) for name in TASK_LABELS):
        return dict(labels)
    return {**labels, "command": label}


def _started_module() -> str | None:
    """The module of `python -m`; None for a script, a folder or a file with a program in it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None or spec.name == "__main__" else str(spec.name)
