"""Stands in for a Python that would load this package: `python -I -S tests/stand_in.py ADDRESS ARGUMENT...`.

It asks the loaded process at this address (tests/preloaded.py) for a fork that is as the Python it stands in for: the same
arguments, environment, folder, open files, signals and process group. It passes signals on to the fork, and ends as the fork
ends. Where that process is gone, or refuses because a fork would not do, it becomes the Python it stands in for.

It is for programs that a shell or another program of ours starts, which `PreloadedPopen` cannot start. The fork has another
parent and another pid than the caller sees. This file loads nothing but what Python has in itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

_LONGEST_MESSAGE = 1 << 16
_PASSED_ON = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGTERM)


def main(address: str, arguments: list[str]) -> NoReturn:
    python = [sys.executable, *arguments]
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        line.connect(f"\0{address}")
        _ask(line, python)
        said = line.recv(_LONGEST_MESSAGE)
    except OSError:
        said = b""
    if said != b"yes":
        os.execv(python[0], python)  # noqa: S606 - that is what it is for
    for number in _PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: line.send(bytes([number])) and None)
    try:
        code = int(line.recv(_LONGEST_MESSAGE) or 1)
    except OSError:
        code = 1
    if code < 0:
        if -code in _PASSED_ON:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _ask(line: _socket.socket, python: list[str]) -> None:
    opened = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]  # noqa: PTH208
    os.umask(mask := os.umask(0o077))
    request = {
        "args": python,
        "env": dict(each.split("=", 1) for each in _given_environment() if "=" in each),
        "cwd": os.getcwd(),  # noqa: PTH109
        "group": os.getpgid(0),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "open": opened,
        "umask": mask,
        "ignored": [n for n in range(1, _signal.NSIG) if n not in (9, 19) and _signal.getsignal(n) == _signal.SIG_IGN],
        "blocked": list(map(int, _signal.pthread_sigmask(_signal.SIG_BLOCK, ()))),
    }
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in opened)
    line.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])


def _given_environment() -> list[str]:
    """As it was given: Python sets LC_CTYPE at its start where there is no LANG."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib takes long to load
        return os.fsdecode(file.read()).split("\0")


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False  # it was that of the folder that was listed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
