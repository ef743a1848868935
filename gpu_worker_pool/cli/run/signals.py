"""Signals to `gpu-pool`, with who sent them: Ctrl-C reaches the command in the terminal by itself, a `kill` does not."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# What ends a program, and what programs are told things by.
PASSED_ON: Final = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
# While there is no command yet, these end the waiting.
ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SI_KERNEL: Final = 0x80


@dataclass(frozen=True, slots=True)
class Received:
    """A signal, and whether the kernel sent it: for what was typed at the terminal, to all in its foreground."""

    number: signal.Signals
    is_from_terminal: bool


class SignalThread:
    """Waits for signals in a thread of its own, because only that way it is told who sent them. They are blocked in all
    others from `start` on; it must be called before any other thread is started.
    """

    def __init__(self, on_signal: Callable[[Received], None]) -> None:
        self._on_signal = on_signal
        # What was ignored before us (by nohup, say) stays ignored.
        self._signals = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}

    def start(self) -> None:
        """From now on they are told, in the event loop that runs."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name="gpu-pool-signals", daemon=True).start()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            info = signal.sigwaitinfo(self._signals)
            received = Received(signal.Signals(info.si_signo), info.si_code == _SI_KERNEL)
            try:
                loop.call_soon_threadsafe(self._on_signal, received)
            except RuntimeError:
                return  # the loop is closed, and the program about to end
