"""The processes of a demo: one server and its workers. They end with the demo, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.host.clock import boot_time

from .folder import DemoFolder
from .worker import Orders, die_with

ROOT: Final = Path(__file__).parents[3]
# However busy the machine is; the demo as a whole is given up sooner.
START_S: Final = 30.0
STOP_S: Final = 3.0
# What a server and a worker of ours may see of the caller's environment. No setting of a server or a client is in it:
# they are made for another pool.
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class DemoServer:
    """A real server, on a free port of this machine and with a journal of its own: no other pool notices it."""

    def __init__(self, folder: DemoFolder) -> None:
        self._folder = folder
        self._log = folder.path / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        # Kept while the server is away: otherwise somebody else, or a worker that tries to connect, may be given the port.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = int(self._reserved.getsockname()[1])

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        return self._process.pid if self._process else -1

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.poll() is None

    async def start(self, settings: Mapping[str, str]) -> None:
        """Start it, or start it again with the journal it has; returns when it is ready, as it says itself."""
        name = f"gpu-pool-demo-{os.getpid()}-{secrets.token_hex(4)}"
        env = {
            **environment(os.environ),
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "GPU_POOL_STATE_DIR": str(self._folder.path / "state"),
            "REFRESH_INTERVAL": "0.5",
            "ACCESS_LOG": "false",
            "NOTIFY_SOCKET": f"@{name}",
            **settings,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("ab") as log:
            ready.bind(f"\0{name}")
            command = [sys.executable, "-m", "gpu_worker_pool.gpu_server"]
            self._process = _start(command, env, self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            if await self._hear_from(ready):
                return
        raise Failure(f"the server of the demo did not start: {_last_words(self._log)}", 1)

    async def _hear_from(self, ready: socket.socket) -> bool:
        """Wait until it says something; False where it ends first, or takes too long."""
        loop, heard, until = asyncio.get_running_loop(), asyncio.Event(), boot_time() + START_S
        loop.add_reader(ready, heard.set)
        try:
            while not heard.is_set() and self.is_running and boot_time() < until:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await heard.wait()
        finally:
            loop.remove_reader(ready)
        return heard.is_set()

    def kill(self) -> None:
        """kill -9: nothing of it is left but its journal."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """Ask it to end; kill it where it does not."""
        if self._process is not None:
            self._process.terminate()
            await _until_ended(self._process)
        self.kill()

    def close(self) -> None:
        """Kill it, if it has not ended, and give its port away."""
        self.kill()
        self._reserved.close()


class DemoWorker:
    """A worker's process, once it has said that it is there. Each line it writes is told to `on_line`."""

    def __init__(self, name: str, on_line: Callable[[dict[str, Any]], None]) -> None:
        self.name = name
        self.pid: int | None = None
        self.has_ended = False
        self._on_line = on_line
        self._rest = b""
        self.reads, self._tells = os.pipe()
        self._hears, self.writes = os.pipe()
        asyncio.get_running_loop().add_reader(self._hears, self._read)

    def tell(self, word: str) -> None:
        """`go PACE` or `finish`."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._tells, f"{word}\n".encode())

    def kill(self) -> None:
        """kill -9."""
        # While its end of the pipe is open it lives, and its pid is its own.
        if self.pid is not None and not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the pipes."""
        asyncio.get_running_loop().remove_reader(self._hears)
        os.close(self._hears)
        os.close(self._tells)

    def _read(self) -> None:
        data = os.read(self._hears, 65536)
        if not data:
            asyncio.get_running_loop().remove_reader(self._hears)
            self.has_ended = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for text in lines:
            line = json.loads(text)
            self.pid = line.get("pid", self.pid)
            self._on_line(line)


class DemoWorkers:
    """All of them, and the process that forked them."""

    def __init__(self, names: Iterable[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self._by_name = {name: DemoWorker(name, on_line) for name in names}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)

    def __getitem__(self, name: str) -> DemoWorker:
        return self._by_name[name]

    def start(self, folder: DemoFolder, endpoint: str, seed: int, cheat: str | None) -> None:
        """Start them; `cheat` is the name of one who does not keep to the rules."""
        workers = self._by_name.values()
        orders = [
            Orders(
                name=worker.name,
                endpoint=endpoint,
                folder=str(folder.path),
                reads=worker.reads,
                writes=worker.writes,
                seed=seed,
                is_cheat=worker.name == cheat,
            )
            for worker in workers
        ]
        command = [sys.executable, "-m", "gpu_worker_pool.cli.demo.worker", json.dumps([asdict(one) for one in orders])]
        theirs = [end for worker in workers for end in (worker.reads, worker.writes)]
        self._log = folder.path / "workers.log"
        with self._log.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = _start(command, environment(os.environ), folder, theirs, **streams)
        for end in theirs:
            os.close(end)

    def tell(self, word: str) -> None:
        """All of them."""
        for worker in self._by_name.values():
            worker.tell(word)

    def unfinished(self) -> list[str]:
        """The names of those that have not ended."""
        return [worker.name for worker in self._by_name.values() if not worker.has_ended]

    def last_words(self) -> str:
        """What they said on standard error last."""
        return _last_words(self._log)

    def close(self) -> None:
        """End whoever has not. Doing so twice is harmless."""
        for worker in self._by_name.values():
            worker.kill()
            worker.close()
        self._by_name = {}
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process of the demo sees of the caller's environment."""
    kept = {name: environ[name] for name in _PASSED_ON if name in environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))}


def _start(
    command: list[str], env: Mapping[str, str], folder: DemoFolder, descriptors: Iterable[int] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    """In a group of its own: Ctrl-C is for the demo, which then ends them in order."""
    parent = os.getpid()
    # No other thread runs in this process, so nothing can be locked in the child. The folder has no .env in it.
    return subprocess.Popen(  # noqa: S603 - our own command
        command,
        env=dict(env),
        cwd=folder.path,
        process_group=0,
        pass_fds=(folder.lock, *descriptors),
        preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - see above
        **streams,
    )


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    text = next((line for line in reversed(lines) if line.strip()), "nothing was said about it")
    return f"{text}; pip install 'gpu-worker-pool[all]'" if "No module named" in text else text


async def _until_ended(process: subprocess.Popen[bytes]) -> None:
    until = boot_time() + STOP_S
    while process.poll() is None and boot_time() < until:  # noqa: ASYNC110 - a process is no event
        await asyncio.sleep(0.02)
