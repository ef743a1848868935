"""Scenes for rules that random histories meet as well, but only after a long search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.harness import Core
from tests.core.scenes import Scene


class PlainScene(Scene):
    def read(self, at: float, **values: Any) -> None:
        """Read every GPU, with these values of a reading."""
        gpu = self.core.gpu
        usual = {"memory_total_mb": 80_000.0, "memory_used_mb": 0.0, "utilization_percent": 0.0, "processes": ()}
        devices = [gpu.Gpu(key, index, "NVIDIA A100") for index, key in enumerate(self.keys)]
        readings = tuple(gpu.Reading(device, at, **{**usual, **values}) for device in devices)
        self.pool.do(self.core.commands.Observe(readings), at)

    def want(self, number: int, now: float, *, priority: int = 0, node: str | None = None, **wishes: Any) -> None:
        """A request of a remote holder, or of a process on this node."""
        request = self.core.request
        process = None if node is None else self.core.gpu.ProcessId(number, 1.0)
        holder = request.Holder(process=process, node=node)
        asked = request.Request(request.Wishes(**wishes), holder, priority=priority, ttl_s=30.0)
        self.pool.do(self.core.commands.RequestLease(f"lease{number}", asked), now)

    def reboot(self, now: float) -> None:
        self.pool.do(self.core.commands.AnnounceNode("box", "next boot"), now)


def ask_for_a_gpu_that_is_held(core: Core) -> None:
    scene = PlainScene(core)
    scene.want(1, 2.0)
    scene.want(2, 3.0)


def ask_for_a_large_gpu(core: Core) -> None:
    scene, gpu = PlainScene(core, gpus=2), core.gpu
    readings = tuple(
        gpu.Reading(gpu.Gpu(key, index, "NVIDIA A100"), 1.5, total_mb, 0.0, 0.0, processes=())
        for index, (key, total_mb) in enumerate(zip(scene.keys, (16_000.0, 80_000.0), strict=True))
    )
    scene.pool.do(core.commands.Observe(readings), 1.5)
    scene.want(1, 2.0, min_memory_mb=40_000.0)


def share_beyond_the_memory(core: Core) -> None:
    """For one share the index keeps to the limit as well; for two, it goes by how many GPUs of a node are open."""
    scene = PlainScene(core, gpus=2)
    scene.want(1, 2.0, memory_mb=50_000.0)
    scene.want(2, 3.0, gpus=2, memory_mb=50_000.0)


def share_beside_an_outsider(core: Core) -> None:
    scene = PlainScene(core, used_mb=50_000.0)
    scene.want(1, 2.0, memory_mb=50_000.0)


def ask_for_a_gpu_of_another_server(core: Core) -> None:
    scene = PlainScene(core)
    scene.read(2.0, other_server="http://other:8000")
    scene.want(1, 3.0)


def ask_for_a_gpu_with_a_fault(core: Core) -> None:
    scene = PlainScene(core)
    scene.read(2.0, fault="it fell off the bus")
    scene.want(1, 3.0)


def wait_before_one_of_a_higher_priority(core: Core) -> None:
    scene = PlainScene(core)
    scene.want(1, 2.0)
    scene.want(2, 3.0)
    scene.want(3, 4.0, priority=1)
    scene.release(1, 5.0)
    scene.see(6.0)


def share_where_another_gpu_is_whole(core: Core) -> None:
    scene = PlainScene(core, gpus=2)
    scene.want(1, 2.0, memory_mb=8_000.0)
    scene.want(2, 3.0, memory_mb=8_000.0)


def fall_silent(core: Core) -> None:
    scene = PlainScene(core)
    scene.want(1, 2.0)
    scene.pool.do(core.commands.Tick(), 32.0)


def renew_halfway(core: Core) -> None:
    scene = PlainScene(core)
    scene.want(1, 2.0)
    scene.pool.do(core.commands.Renew(("lease1",)), 17.0)
    scene.pool.do(core.commands.Tick(), 40.0)


def hold_through_a_reboot(core: Core) -> None:
    """One holder runs on the node, one on another, and one is not known to run anywhere."""
    scene = PlainScene(core, gpus=3)
    for number, node in enumerate(("box", "another", None)):
        scene.want(number, 2.0, node=node)
    scene.reboot(3.0)


def see_a_node_that_has_not_announced_itself(core: Core) -> None:
    scene = PlainScene(core)
    scene.pool.do(core.commands.TakeOver(0, "boot"), 2.0)
    scene.see(3.0)


def read_a_fault_while_no_request_waits(core: Core) -> None:
    """The soak found this one: the log that is replayed at once must add up to the same as step by step."""
    scene = PlainScene(core)
    scene.want(1, 2.0)
    scene.read(3.0, fault="it fell off the bus")
    scene.read(4.0)
    scene.pool.check_replay()


PLAIN_SCENES: dict[str, Callable[[Core], None]] = {
    "an exclusive GPU has one lease": ask_for_a_gpu_that_is_held,
    "committed memory stays below the limit": share_beyond_the_memory,
    "outside memory counts": share_beside_an_outsider,
    "a GPU is as large as it must be": ask_for_a_large_gpu,
    "a GPU of another server is not granted": ask_for_a_gpu_of_another_server,
    "a GPU with a fault is not granted": ask_for_a_gpu_with_a_fault,
    "higher priority goes first": wait_before_one_of_a_higher_priority,
    "a share breaks no whole GPU while it fits beside others": share_where_another_gpu_is_whole,
    "a lease runs out": fall_silent,
    "renewing gives a full TTL": renew_halfway,
    "after a reboot no local process is alive": hold_through_a_reboot,
    "a reboot ends only what runs on that node": hold_through_a_reboot,
    "what is settled while no request waits depends on the events alone": read_a_fault_while_no_request_waits,
    "readings of a node count once it has announced itself": see_a_node_that_has_not_announced_itself,
}
