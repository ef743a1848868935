"""`gpu-pool` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import ServerProcess
from tests.preloaded import NO_CERTIFICATES, PreloadedPopen
from tests.server.running import ROOT

GPU_POOL = (sys.executable, "-m", "gpu_worker_pool")
# Nothing here takes so long; a command that hangs must not hang the tests.
MOST_S = 60.0
# A server that takes its machine for another one than this, as one behind a tunnel: by what it takes for its boot id.
ON_ANOTHER_MACHINE = (
    sys.executable,
    "-c",
    (
        "import gpu_worker_pool.host.clock as c; c.boot_id.__wrapped__; c._named_by_linux = lambda: 'elsewhere';"
        "import runpy; runpy.run_module('gpu_worker_pool.gpu_server', run_name='__main__')"
    ),
)
_started: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its only line of output."""
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def environment(server: ServerProcess | str | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a command sees: nothing of the settings of whoever runs the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    endpoint = server.url if isinstance(server, ServerProcess) else server
    pool = {"GPU_SERVICE_ENDPOINT": endpoint} if endpoint else {}
    # A server started by a test leaves nothing where the servers of this machine have their sockets.
    kept["GPU_POOL_SOCKET"] = ""
    return {**kept, **NO_CERTIFICATES, "PYTHONPATH": str(ROOT), **pool, **(extra or {})}


def gpu_pool(
    *arguments: str,
    server: ServerProcess | str | None = None,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    cwd: Path | None = None,
) -> Done:
    """Run it to its end."""
    process = PreloadedPopen(
        [*GPU_POOL, *arguments],
        env=environment(server, env),
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    with process:
        try:
            out, err = process.communicate(text, timeout=MOST_S)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


def start_gpu_pool(
    *arguments: str,
    server: ServerProcess | str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[str]:
    """Start it, in a process group of its own; whoever does ends it, or has `end_all` do it."""
    process = PreloadedPopen(
        [*GPU_POOL, *arguments],
        env=environment(server, env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        process_group=0,
    )
    _started.append(process)
    return process


def end_all() -> None:
    """Where a test failed half-way, what it had started must not outlive it."""
    for process in _started:
        if process.returncode is None:
            process.kill()
            process.communicate()
    _started.clear()
