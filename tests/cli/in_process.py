"""`gpu-pool` without a process of its own: for what a process would only make slower."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from gpu_worker_pool.cli.app import main
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import Done, environment


def called(*arguments: str, server: ServerProcess | str | None = None, env: Mapping[str, str] | None = None) -> Done:
    """Run a command to its end, as `own_process.gpu_pool` does. Not one that blocks signals, as `run` and `join` do: every
    process that a later test starts would inherit that, and could not be ended by SIGTERM.
    """
    out, err, blocked = io.StringIO(), io.StringIO(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with _environment(environment(server, env)), redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
    finally:
        left = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert left == blocked, f"gpu-pool {arguments[0]} blocks signals: give it a process of its own (own_process.py)"
    return Done(code, out.getvalue(), err.getvalue())


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
