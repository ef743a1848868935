"""Signals to `gpu-pool`, with their senders: Ctrl-C in a terminal reaches the command by itself, a `kill` does not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

# Until the command is started, these end the wait.
ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
PASSED_ON: Final = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
_SI_KERNEL: Final = 0x80


@dataclass(frozen=True, slots=True)
class Received:
    """A signal. One that was typed at the terminal was sent by the kernel, to every process in the foreground."""

    number: signal.Signals
    is_typed: bool


class Signals:
    """Waits for signals in a thread, because only `sigwaitinfo` tells who sent them.

    It is made in the event loop and before another thread is started: the signals are blocked in all threads that are
    started later. A signal that comes while none is `passed_to` a function is kept for the next one.
    """

    def __init__(self) -> None:
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        # A signal that was ignored before (by nohup, say) stays ignored.
        self._signals = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name="gpu-pool-signals", daemon=True).start()

    @asynccontextmanager
    async def passed_to(self, react: Callable[[Received], None]) -> AsyncIterator[None]:
        """Call `react` with each signal, in the event loop, for the length of the block."""

        async def pass_on() -> None:
            while True:
                react(await self._received.get())

        passing_on = asyncio.create_task(pass_on())
        try:
            yield
        finally:
            passing_on.cancel()
            await asyncio.wait([passing_on])

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            info = signal.sigwaitinfo(self._signals)
            # The kernel sends SIGHUP too, when the terminal is gone: to the leader of the session only.
            is_typed = info.si_code == _SI_KERNEL and info.si_signo != signal.SIGHUP
            received = Received(signal.Signals(info.si_signo), is_typed)
            try:
                loop.call_soon_threadsafe(self._received.put_nowait, received)
            except RuntimeError:
                return  # the loop is closed, and the program is about to end


def has_controlling_terminal() -> bool:
    """Whether a terminal controls this process.

    The command then shares our process group: what is typed reaches it, and the shell's job control (Ctrl-Z, fg, bg)
    takes both for one job.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
