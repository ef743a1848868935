"""A network namespace that has only loopback, for servers that listen on all addresses even when they are told otherwise."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import peers
from benchmarks.processes import running, wait_until

CHECK_S = 10.0


@contextmanager
def running_apart(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None, *, as_root: bool = False
) -> Iterator[list[str]]:
    """Run a program in a new namespace. Yield the beginning of a command that joins it there.

    The program seems to run as root; `as_root` is for one that must really do so. In the end, all processes in the
    namespace are ended, including those that have left the group of the process that started them.
    """
    ours = _namespace_of("self")
    made: str | None = None
    try:
        with running(_starting(command, as_root=as_root), log, env) as pid:
            wait_until(lambda: _namespace_of(pid) not in (ours, None), "the network namespace is made")
            made = _namespace_of(pid)
            user = [] if as_root else ["--user", "--preserve-credentials"]
            yield [peers.program("nsenter"), f"--target={pid}", *user, "--net"]
    finally:
        if made not in (ours, None):
            _end_all_in(made)


def _starting(command: Sequence[str | Path], *, as_root: bool) -> list[str]:
    if as_root and os.geteuid() != 0:
        raise peers.MissingError("its daemons must be started by root")
    user = [] if as_root else ["--user", "--map-root-user"]
    apart = [peers.program("unshare"), *user, "--net"]
    ip = peers.program("ip")
    if subprocess.run([*apart, ip, "link"], capture_output=True, check=False, timeout=CHECK_S).returncode:
        raise peers.MissingError(
            "it listens on all addresses, and unshare cannot give it a network namespace of its own"
        )
    # A program that searches the addresses of this machine does not count the first address of loopback.
    shell = f"{ip} link set lo up && {ip} addr add 127.0.0.2/8 dev lo && exec {shlex.join(map(str, command))}"
    return [*apart, "sh", "-c", shell]


def _namespace_of(pid: int | str) -> str | None:
    """Return the network namespace of a process, or None if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def _end_all_in(namespace: str | None) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        if _namespace_of(folder.name) == namespace:
            with suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
