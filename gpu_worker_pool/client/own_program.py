"""The program that this process runs, for others to see: its script or module, or that it is a notebook."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache

from gpu_worker_pool.core.model.request import TASK_LABELS
from gpu_worker_pool.wire.bounds import MAX_LABELS, MAX_LABELS_BYTES

from .command_label import command_label


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
        return command_label(["python", "-m", module.removesuffix(".__main__")])
    return command_label(["python", *argv[:1]])


def with_own_label(labels: Mapping[str, str]) -> dict[str, str]:
    """These labels with that of this program, unless they name a task or there is no room for another label."""
    label = _label(tuple(sys.argv[:1]), _started_module(), ipython_shell())
    size = sum(len(str(text).encode("utf-8", "replace")) for item in labels.items() for text in item)
    has_room = len(labels) < MAX_LABELS and size + len(f"command{label}".encode()) <= MAX_LABELS_BYTES
    if not has_room or any(labels.get(name) for name in TASK_LABELS):
        return dict(labels)
    return {**labels, "command": label}


# A program seldom changes its name, and asks for GPUs often.
_label = lru_cache(maxsize=1)(program_label)


def _started_module() -> str | None:
    """The module of `python -m`; None for a script, a folder or a file with a program in it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None or spec.name == "__main__" else str(spec.name)
