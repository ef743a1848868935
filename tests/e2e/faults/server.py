"""Faults of the server: killed, stopped, away for long, a full disk.

The disk fault: RLIMIT_FSIZE of the running server is set to 0, so that every write to a file fails with EFBIG, and put
back. The server's log is such a file, too, and misses what the server said meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal

from .scene import Fault, Scene
from .second_server import SecondServer
from .workers import Crew

FAILPOINTS = ("before_append", "in_append", "after_append")


class ServerFaults:
    """What is done to the server, and what starts it again."""

    def __init__(self, scene: Scene, crew: Crew, second: SecondServer) -> None:
        self.scene = scene
        self.crew = crew
        self.second = second
        self.server = scene.server
        self.say = scene.recorder.say
        self.random = scene.random
        self.next_failpoint: str | None = None
        self.is_away = False
        self.is_over = False

    def faults(self) -> dict[str, Fault]:
        return {
            "kill_server": self.kill,
            "kill_server_at_failpoint": self.kill_at_failpoint,
            "stop_server": self.stop,
            "fill_disk": self.fill_disk,
            "outage": self.outage,
        }

    async def keep_up(self) -> None:
        """As systemd would. It has died by our hand or at a failpoint."""
        while not self.is_over:
            if not self.server.is_running and self.has_to_run():
                self.server.unwell()
                code = self.server.process.returncode if self.server.process else None
                self.say("server_died", code=code)
                await asyncio.sleep(self.random.choice((0.0, 0.0, 0.5)))
                if not self.has_to_run():
                    continue
                failpoint, self.next_failpoint = self.next_failpoint, None
                await self.server.come_up(failpoint)
                self.say("server_started")
            await asyncio.sleep(0.02)

    def has_to_run(self) -> bool:
        return not self.is_away and not self.second.is_looking

    async def heal(self) -> None:
        if self.server.failpoint or self.next_failpoint:
            self.next_failpoint = None
            self.server.kill()
        await self.server.until_well()

    async def kill(self) -> None:
        self.say("server_killed")
        self.server.kill()

    async def kill_at_failpoint(self) -> None:
        """Killed now, and again by itself at a boundary of its journal soon after it has come up."""
        self.next_failpoint = f"{self.random.choice(FAILPOINTS)}:{self.random.randint(2, 40)}"
        self.say("failpoint_set", failpoint=self.next_failpoint)
        self.server.kill()

    async def stop(self) -> None:
        await self.server.until_well()
        stop_s, pid = self.random.uniform(0.5, 4.5), self.server.pid
        self.say("server_stopped", for_s=stop_s)
        self.server.unwell()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stop_s)
        if self.server.pid == pid and self.server.is_running:
            os.kill(pid, signal.SIGCONT)
            self.server.recover()
        self.say("server_continued")

    async def fill_disk(self) -> None:
        await self.server.until_well()
        pid = self.server.pid
        self.server.unwell()
        self.server.limit_files(0)
        self.say("disk_filled")
        await asyncio.sleep(self.random.uniform(0.3, 1.8))
        if self.server.pid == pid and self.server.is_running:
            self.server.limit_files(resource.prlimit(pid, resource.RLIMIT_FSIZE)[1])
            self.server.recover()
        self.say("disk_freed")

    async def outage(self) -> None:
        """Away for several TTLs. A local holder loses nothing by it, a remote one its lease, by its own clock."""
        holders = [self.crew.start(role, is_spared=True) for role in self.scene.plan.outage_roles()]
        await self.crew.until_held(holders)
        self.is_away = True
        self.server.kill()
        self.say("server_away", for_s=self.scene.plan.outage_s)
        await asyncio.sleep(self.scene.plan.outage_s)
        self.is_away = False
        await self.server.until_well()
        self.say("server_back")
        await self.crew.end(holders)
