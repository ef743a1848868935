"""Runs shell blocks: in a folder of their own, with the documents' names leading to servers of the tests."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.documents.answers import assert_fits
from tests.documents.blocks import ROOT, Block, Chain
from tests.documents.names import PORT, hosts_in, port_for
from tests.documents.network import Network
from tests.preloaded import NO_CERTIFICATES, stand_in
from tests.server.leasing import eventually
from tests.server.running import ask_over, free_port

MOST_S = 60.0
BETWEEN = "--- the next block ---"
SHELL = ("bash", "-euo", "pipefail")
# Beside the block, as they are beside a reader who sits in a clone.
BESIDE = ("gpu_worker_pool", "deploy", "examples", "benchmarks", ".env.example")

# What a reader has beside him as well: a program that uses a GPU.
TRAIN = 'import os\n\nprint("training on GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))\n'

# What a server is started with has its place on this machine taken by one that is free.
_PROGRAMS = {
    "python": (
        'case "$*" in *gpu_server*) export HOST=127.0.0.1 PORT="$SERVE_PORT"; exec {preloaded} "$@";; esac\n'
        'exec "{python}" "$@"'
    ),
    "uvicorn": 'exec "{python}" -m uvicorn "$@" --host 127.0.0.1 --port "$SERVE_PORT"',
    "gpu-pool": (
        'if [ "${{1-}}" = serve ]; then set -- "$@" --host 127.0.0.1 --port "$SERVE_PORT"; fi\n'
        'exec {preloaded} -m gpu_worker_pool "$@"'
    ),
    # What a target would do is tested elsewhere, or is this very run; that there is such a target is seen here.
    "make": 'exec "{make}" --dry-run --directory "{root}" "$@" >/dev/null',
}
# These would change this machine; a block with one of them must be marked.
_FORBIDDEN = ("pip", "uv", "docker", "sudo", "systemctl", "git", "apt-get", "useradd")


class Shell:
    """A scratch folder in which one chain is run."""

    def __init__(self, folder: Path, network: Network, chain: Chain) -> None:
        self._folder = folder
        self._chain = chain
        self._port = free_port()
        text = "\n".join(block.text for block in chain)
        self._prepare(text, network.ports)
        kept = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ}
        self._env = {
            **kept,
            **NO_CERTIFICATES,
            "PATH": f"{folder / '.bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            # Unless root runs it, which would leave it where the servers of this machine have theirs.
            "GPU_POOL_SOCKET": str(folder / "pool.sock"),
            "PYTHONPATH": f"{folder / '.python'}:{ROOT}",
            # What a reader has not installed: to load it takes pytest longer than all else.
            "PYTEST_ADDOPTS": "-p no:schemathesis -p no:anyio -p no:playwright -p no:hypothesispytest",
            "SERVE_PORT": str(self._port),
            "GPU_POOL_STATE_DIR": str(folder / "state"),
            **network.environment(text),
        }

    def run(self) -> None:
        """Run all blocks of the chain in one shell, and hold the json blocks against what was printed."""
        last = self._chain[-1]
        assert not any("fails" in block.marks for block in self._chain[:-1]), "only the last of a chain can fail"
        if "runs-on" in last.marks:
            self._run_until_it_prints()
            return
        done = subprocess.run(
            [*SHELL, self._script()],
            env=self._env,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        assert (done.returncode != 0) == ("fails" in last.marks), (str(last), done.returncode, done.stdout, done.stderr)
        printed = done.stdout.split(f"{BETWEEN}\n")
        assert len(printed) == len(self._chain), (str(last), done.stdout)
        for block, output in zip(self._chain, printed, strict=True):
            for answer in block.answers:
                if "of" not in answer.marks:
                    assert_fits(answer, _last_json(block, output))

    def serve(self) -> None:
        """Start the server that the last block starts, see that it answers, and end it."""
        notify = self._folder / ".notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(notify))
            ready.settimeout(0.2)
            # A block's own settings win over these.
            env = {"SIMULATED_GPUS": "4", "REFRESH_INTERVAL": "0.1", **self._env, "NOTIFY_SOCKET": str(notify)}
            with (self._folder / ".log").open("wb") as log:
                process = subprocess.Popen(
                    [*SHELL, self._script()], env=env, cwd=self._folder, stdout=log, stderr=log, process_group=0
                )
            try:
                self._wait_until(ready, process)
                self._look_at_it()
            finally:
                _end(process)

    def _wait_until(self, ready: socket.socket, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + MOST_S
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(TimeoutError):
                assert ready.recv(64) == b"READY=1"
                return
        raise AssertionError(f"{self._chain[-1]}: no server: {(self._folder / '.log').read_text(encoding='utf-8')}")

    def _look_at_it(self) -> None:
        get(self._port, "/livez")
        for answer in self._chain[-1].answers:
            assert_fits(answer, get(self._port, answer.marks["of"]) if "of" in answer.marks else self._announcement())

    def _announcement(self) -> Any:
        """What `gpu-pool serve --json` says once it is ready, which may be a moment after it is."""
        log = self._folder / ".log"
        said = re.compile(r'^\{"schema": .*\}$', re.MULTILINE)
        return json.loads(eventually(lambda: said.search(log.read_text(encoding="utf-8")), "what it says")[0])

    def _run_until_it_prints(self) -> None:
        process = subprocess.Popen(
            [*SHELL, self._script()], env=self._env, cwd=self._folder, stdout=subprocess.PIPE, process_group=0
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), f"{self._chain[-1]} printed nothing"
        finally:
            _end(process)
            process.stdout.close()

    def _script(self) -> str:
        path = self._folder / ".script"
        path.write_text(f"\necho '{BETWEEN}'\n".join(block.text for block in self._chain), encoding="utf-8")
        return str(path)

    def _prepare(self, text: str, ports: Mapping[str, int]) -> None:
        folder, python = self._folder, self._folder / ".python"
        (folder / ".bin").mkdir()
        refusals = {name: f"echo 'not here: mark this block not-run ({name})' >&2; exit 1" for name in _FORBIDDEN}
        for name, script in (_PROGRAMS | refusals).items():
            program = folder / ".bin" / name
            preloaded = shlex.join(stand_in())
            body = script.format(python=sys.executable, preloaded=preloaded, root=ROOT, make=shutil.which("make"))
            program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
            program.chmod(0o700)
        python.mkdir()
        (python / "sitecustomize.py").write_text("from tests.documents.names import lead\n\nlead()\n", encoding="utf-8")
        for name in BESIDE:
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        if "gpu-pool backup" in text:
            SqliteJournal(folder / "state" / "leases.sqlite3").close()  # as a server has left it that ran here
        leads = [f'connect-to = "{host}:{PORT}:127.0.0.1:{port_for(host, ports)}"' for host in sorted(hosts_in(text))]
        options = ["silent", "show-error", "fail-with-body", "max-time = 20", r'write-out = "\n"', *leads]
        (folder / ".curlrc").write_text("\n".join(options) + "\n", encoding="utf-8")


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        answer = ask_over(connection, path)
    finally:
        connection.close()
    assert answer.status == 200, (path, answer)
    return answer.json


def _last_json(block: Block, output: str) -> Any:
    lines = [line for line in output.splitlines() if line.strip()]
    for text in (lines[-1] if lines else "", output):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            continue
    raise AssertionError(f"{block} printed no JSON at its end: {output!r}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started, at once: how a server stops is tested elsewhere."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def calls(text: str, program: str) -> bool:
    """Whether a block calls this program."""
    return re.search(rf"(?:^|[\s;&|(]){re.escape(program)}\s", text, re.MULTILINE) is not None
