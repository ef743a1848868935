"""What systemd is told by a service, and what it does with the processes of a user who logs out."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final


def notify(state: str) -> bool:
    """Send a state such as READY=1; return whether it was sent."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), address)
    except OSError:
        return False
    return True


@contextmanager
def when_asked_to_stop(react: Callable[[], None]) -> Iterator[None]:
    """Call `react` in the event loop as soon as SIGTERM or SIGINT comes, before the present handler.

    uvicorn waits for open connections before it tells the application to stop; long polls would keep it waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(react)
        before = handlers[signal.Signals(number)]
        if callable(before):
            before(number, frame)

    ours = {number: handle for number, before in handlers.items() if callable(before)}
    for number, handler in ours.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is handle:
                signal.signal(number, handlers[number])


# The setting as systemd has read it, from all of its files.
_KILLS_AT_LOGOUT: Final = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "KillUserProcesses"),
)
_ANSWER_S: Final = 5.0


def logout_ends(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether systemd ends this process when its user logs out: it belongs to a session, and `KillUserProcesses` is set."""
    try:
        if "/session-" not in (proc / f"{pid}/cgroup").read_text(encoding="utf-8"):
            return False
        asked = subprocess.run(_KILLS_AT_LOGOUT, capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603
    except (OSError, UnicodeError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == "b true"
