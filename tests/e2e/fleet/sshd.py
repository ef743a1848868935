"""A real sshd on this machine, for a user's own ssh to the other boxes of a fleet."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.running import ROOT, free_port

_PROGRAM = "/usr/sbin/sshd"
_LISTENS = "Server listening on"


@contextmanager
def sshd(folder: Path, environ: Mapping[str, str], as_user: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The environment in which `ssh` and `gpu-pool` are found, and ssh leads to this machine whatever the host is called. What it
    starts has `environ`, and nothing of the test's; `as_user` is the command that makes another user of it.
    """
    if not os.path.exists(_PROGRAM) or shutil.which("ssh") is None:  # noqa: PTH110 - as the rest of it
        pytest.skip("there is no sshd: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server that runs as root has to find it
    bin_, port = folder / "bin", free_port()
    bin_.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)  # noqa: S607
    path = f"{bin_}:{os.environ['PATH']}"
    there = {"PATH": path, "PYTHONPATH": str(ROOT), "GPU_POOL_SOCKET": "", **environ}
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in there.items())}\n"
        + (f'ForceCommand exec {shlex.join(as_user)} sh -c "$SSH_ORIGINAL_COMMAND"\n' if as_user else "")
    )
    (folder / "ssh_config").write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nUser {getpass.getuser()}\nIdentityFile {folder}/user\n"
        "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    for name, line in {
        "ssh": f'{shutil.which("ssh")} -F {folder}/ssh_config "$@"',
        "gpu-pool": f'{sys.executable} -m gpu_worker_pool "$@"',
    }.items():
        (bin_ / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (bin_ / name).chmod(0o755)
    command = [_PROGRAM, "-D", "-e", "-f", str(folder / "sshd_config")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        try:
            assert _LISTENS in line, line
            yield {"PATH": path}
        finally:
            server.terminate()
            server.stderr.read()
