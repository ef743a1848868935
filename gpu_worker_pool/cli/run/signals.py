"""Signals to `gpu-pool`, with their senders: Ctrl-C in a terminal reaches the command by itself, a `kill` does not."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
# Until the command is started, these end the wait.
ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SI_KERNEL: Final = 0x80


@dataclass(frozen=True, slots=True)
class Received:
    """A signal. One that was typed at the terminal was sent by the kernel, to every process in the foreground."""

    number: signal.Signals
    is_from_terminal: bool


class SignalThread:
    """Waits for signals in a thread, because only `sigwaitinfo` tells who sent them.

    From `start` on the signals are blocked in all other threads, so it must be called before another thread is started.
    """

    def __init__(self, on_signal: Callable[[Received], None]) -> None:
        self._on_signal = on_signal
        # A signal that was ignored before (by nohup, say) stays ignored.
        self._signals = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}

    def start(self) -> None:
        """Pass the signals to `on_signal` from now on, in the running event loop."""
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
                return  # the loop is closed, and the program is about to end
