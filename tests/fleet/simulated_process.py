"""A process on a machine of the simulation: its own clock, and what kill -9, SIGSTOP and SIGCONT do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fleet.simulated_world import World


class SimulatedProcess:
    def __init__(self, world: World, name: str, *, clock_offset_s: float, drift: float) -> None:
        self.world, self.name = world, name
        self.clock_offset_s, self.drift = clock_offset_s, drift
        self.is_dead = True
        self.is_stopped = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # What was under way when it was killed does not concern the process that is started next.
        self.incarnation = 0

    def start(self) -> None:
        self.incarnation += 1
        self.is_dead = self.is_stopped = False
        self.backlog.clear()

    def start_again(self) -> None:
        if self.is_dead:
            self.start()

    def kill(self) -> None:
        self.is_dead = True
        self.incarnation += 1

    def run(self, incarnation: int, action: Callable[..., None], *args: Any) -> None:
        """Do something, unless the process is gone; a stopped one does it when it goes on."""
        if incarnation != self.incarnation:
            return
        if self.is_stopped:
            self.backlog.append((action, args))
        else:
            action(*args)

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.is_stopped = not self.is_dead

    def resume(self) -> None:
        if not self.is_stopped:
            return
        self.is_stopped = False
        backlog, self.backlog = self.backlog, []
        for action, args in backlog:
            if not self.is_dead and not self.is_stopped:
                action(*args)

    def boot_now(self) -> float:
        return self.clock_offset_s + self.world.now * (1 + self.drift)

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.world.at(delay_s / (1 + self.drift), self.run, self.incarnation, action, *args)

    def ask(
        self, call: Callable[..., Any], args: tuple[Any, ...], then: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        self.world.ask_database(self, call, args, then, failed)
