"""Random interleavings of every command, with time that advances, repeats and goes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from tests.core.harness import REAL, CheckedPool, Core

# node, index, name, memory: two models on one node, so that "enough of one model" has something to choose from.
GPUS = (
    ("alpha", 0, "NVIDIA A100", 80_000),
    ("alpha", 1, "NVIDIA A100", 80_000),
    ("beta", 0, "NVIDIA A100", 80_000),
    ("beta", 1, "NVIDIA A100", 80_000),
    ("beta", 2, "Tesla T4", 16_000),
)

NODES = ("alpha", "beta")

MEMORY = (0.0, 0.0, 0.3, 0.79, 0.8, 0.94)
UTILIZATION = (0.0, 0.0, 5.0, 49.0, 89.9, 90.0, 97.0)

KINDS = ("ok", "ok", "ok", "ok", "fault", "unknown memory", "unknown utilization", "other server")

# By index, by UUID, by how one UUID begins, by how several do (which names no GPU), and by what is not there.
AMONG: list[tuple[str, ...] | None] = [
    ("0",),
    ("1", "2"),
    ("GPU-alpha-1",),
    ("0", "gpu-BETA-1"),
    ("GPU-al", "GPU-beta-0", "GPU-beta-2"),
    ("2", "GPU-beta"),
    ("7", "GPU-alpha-0"),
]

gpu_numbers = st.integers(0, len(GPUS) - 1)
# A gang is not bound to one node.
wishes = st.fixed_dictionaries(
    {
        "gpus": st.sampled_from([1, 1, 1, 2, 2, 3]),
        "memory_mb": st.sampled_from([None, None, 8_000, 40_000, 60_000]),
        "model": st.sampled_from([None, None, None, "A100", "T4", "T4,A100"]),
        "min_memory_mb": st.sampled_from([None] * 8 + [17_000, 40_000]),
        "exclude": st.sampled_from([None] * 8 + [("0",), ("GPU-beta",), ("1", "GPU-alpha-0")]),
        "memory_threshold_percent": st.sampled_from([None, None, 30.0, 95.0]),
        "utilization_threshold_percent": st.sampled_from([None, None, None, 50.0, 99.0]),
        "among": st.sampled_from([None] * 3 * len(AMONG) + AMONG),
        "nodes": st.sampled_from([1, 1, 1, 1, 2]),
        "node": st.sampled_from([None, None, *NODES, "gone"]),
    }
).map(lambda wished: wished if wished["nodes"] == 1 else {**wished, "node": None})
looks = st.lists(
    st.tuples(
        gpu_numbers,
        st.sampled_from(MEMORY),  # used by no process in particular
        st.sampled_from(UTILIZATION),
        st.booleans(),  # whether the leases' processes are seen to be running
        st.sampled_from([None, "Xorg", "python", "own"]),  # a process outside; "own" is a child of a program that asks
        st.sampled_from(KINDS),
        st.booleans(),  # whether holders that released their GPU have left only a context there
    ),
    max_size=5,
    unique_by=lambda look: look[0],
)


POOL_SETTINGS = st.fixed_dictionaries(
    {
        "max_sharers": st.sampled_from([64, 64, 1, 2]),
        "awaits_reading_after_release": st.booleans(),
        "outsiders": st.sampled_from(["avoid", "thresholds", "by_request", "by_request"]),
        "remembered_ended_leases": st.sampled_from([0, 3, 100]),
        "reserve_after_s": st.sampled_from([0.0, 0.0, 10.0, 600.0]),
        "take_up_s": st.sampled_from([None, 5.0]),
    }
)
# In a small pool requests get into each other's way more.
sizes = st.sampled_from([1, 2, len(GPUS)])


class PoolMachine(RuleBasedStateMachine):
    core: Core = REAL
    leases = Bundle("leases")

    # It is given all that it depends on, and draws nothing: then the steps that hypothesis prints are a whole program.
    @initialize(settings=POOL_SETTINGS, size=sizes)
    def start(self, settings: dict[str, Any], size: int) -> None:
        self.size = size
        self.pool = CheckedPool(self.core, stale_after_s=15.0, drain_limit_s=20.0, **settings)
        self.now = 100.0
        self.count = 0
        self.nodes = tuple(dict.fromkeys(node for node, *_ in GPUS[: self.size]))
        self.boots = dict.fromkeys(NODES, 1)
        self.takers = 1
        self.wall = 1e6
        self.is_renumbered = False
        self.restart(NODES, (), is_fleet=False)
        self.see_all_idle()

    def key(self, number: int) -> Any:
        node, index, _, _ = GPUS[number]
        return self.core.gpu.GpuKey(node, f"GPU-{node}-{index}")

    def reading(
        self,
        number: int,
        memory: float,
        utilization: float,
        runs: bool,
        outsider: str | None,
        kind: str,
        leaves_context: bool = False,
    ) -> Any:
        gpu = self.core.gpu
        node, index, name, total = GPUS[number]
        if self.is_renumbered:
            index = sum(other == node for other, *_ in GPUS) - 1 - index
        key = self.key(number)
        by_pid: dict[int, list[Any]] = {}
        for lease in self.pool.model.on(key) if runs else []:
            by_pid.setdefault(lease.request.holder.pid, []).append(lease)
        processes = []
        for pid, leases in by_pid.items():
            is_over = all(lease.state == "draining" for lease in leases)
            processes.append(
                gpu.GpuProcess(
                    gpu.ProcessId(pid + 10_000, float(pid)),
                    (0.01 if leaves_context and is_over else 0.2) * total,
                    "train",
                    () if is_over else (gpu.ProcessId(pid, float(pid)),),
                )
            )
        if outsider is not None:
            parents = (gpu.ProcessId(901, 901.0),) if outsider == "own" else ()
            processes.append(gpu.GpuProcess(gpu.ProcessId(77, 1.0), 0.1 * total, outsider, parents))
        used = memory * total + sum(p.memory_mb or 0 for p in processes)
        return gpu.Reading(
            gpu.Gpu(key, index, name, number % 2 if self.is_renumbered else None),
            self.now,
            total,
            None if kind == "unknown memory" else used,
            None if kind == "unknown utilization" else utilization,
            processes=tuple(processes),
            fault="fell off the bus" if kind == "fault" else None,
            other_server="bob's server" if kind == "other server" else None,
        )

    @rule()
    def see_all_idle(self) -> None:
        self.announce(NODES)
        readings = tuple(self.reading(number, 0.0, 0.0, False, None, "ok") for number in range(self.size))
        self.pool.do(self.core.commands.Observe(readings), self.now)

    @rule(
        memory=st.sampled_from(MEMORY),
        utilization=st.sampled_from(UTILIZATION),
        runs=st.booleans(),
        kind=st.sampled_from(KINDS),
        renumbers=st.sampled_from([False, False, True]),  # the same GPUs have other indices
    )
    def see_all_alike(self, memory: float, utilization: float, runs: bool, kind: str, renumbers: bool) -> None:
        self.is_renumbered ^= renumbers
        readings = tuple(self.reading(number, memory, utilization, runs, None, kind) for number in range(self.size))
        self.pool.do(self.core.commands.Observe(readings), self.now)

    @rule(looks=looks, age_s=st.sampled_from([0.0, 0.0, 0.1, 0.3, 16.0, -5.0]))
    def observe(self, looks: list[Any], age_s: float) -> None:
        self.now -= age_s
        readings = tuple(self.reading(*look) for look in looks if look[0] < self.size)
        self.now += age_s
        self.pool.do(self.core.commands.Observe(readings), self.now)

    @rule(
        target=leases,
        wishes=wishes,
        priority=st.sampled_from([0, 0, 0, 5, -1]),
        ttl_s=st.sampled_from([10.0, 30.0, 1000.0, 1000.0]),
        is_local=st.booleans(),
        program=st.sampled_from([None, None, 901, 902]),
        time_limit_s=st.sampled_from([None, None, None, 10.0, 40.0]),
    )
    def request(
        self,
        wishes: dict[str, Any],
        priority: int,
        ttl_s: float,
        is_local: bool,
        program: int | None,
        time_limit_s: float | None,
    ) -> Any:
        return self.ask(wishes, priority, ttl_s, is_local, program, {"time_limit_s": time_limit_s})

    def ask(
        self,
        wishes: dict[str, Any],
        priority: int,
        ttl_s: float,
        is_local: bool,
        program: int | None,
        terms: dict[str, Any],
        owner: str | None = None,
    ) -> Any:
        self.count += 1
        # Most are processes of their own; some are workers of one of two programs.
        pid = program or self.count
        request = self.core.request
        holder = request.Holder(
            worker_id=f"w{self.count}",
            owner=owner,
            # Holders that declare memory are local here, so that the plain model can weigh them.
            pid=pid,
            process=self.core.gpu.ProcessId(pid, float(pid)) if is_local or wishes["memory_mb"] is not None else None,
            node=(None, *NODES)[self.count % 3] if wishes["memory_mb"] is None else None,
        )
        asked = request.Request(request.Wishes(**wishes), holder, priority, ttl_s, **terms)
        events = self.pool.do(self.core.commands.RequestLease(f"lease{self.count}", asked), self.now)
        was_refused = any(isinstance(event, self.core.events.Refused) for event in events)
        could_be = self._could_ever(asked.wishes)
        is_within_limits = self._is_within_limits(asked)
        # A node that the pool has never heard of may still join.
        is_known = any(asked.wishes.node in {None, key.node} for key in self.pool.model.inventory)
        assert was_refused == (not is_within_limits or (is_known and not could_be))
        return multiple() if was_refused else (f"lease{self.count}", asked)

    @rule(target=leases, memory_mb=st.sampled_from([8_000, 40_000]))
    def request_a_share(self, memory_mb: float) -> Any:
        plain = dict.fromkeys(("model", "memory_threshold_percent", "utilization_threshold_percent"))
        return self.ask({"gpus": 1, "memory_mb": memory_mb, **plain}, 0, 1000.0, True, None, {})

    @rule(target=leases, program=st.sampled_from([901, 902]))
    def request_in_a_program(self, program: int) -> Any:
        plain = dict.fromkeys(("memory_mb", "model", "memory_threshold_percent", "utilization_threshold_percent"))
        return self.ask({"gpus": 1, **plain}, 0, 1000.0, True, program, {})

    def _could_ever(self, wishes: Any) -> bool:
        default = self.pool.settings.thresholds.memory_percent
        percent = default if wishes.memory_threshold_percent is None else wishes.memory_threshold_percent
        seen, known = self.pool.model.readings, self.pool.model.inventory
        fitting = [
            node
            for number, (node, _, name, total) in enumerate(GPUS)
            if self.key(number) in known
            and not (self.key(number) in seen and seen[self.key(number)].other_server)
            and self.pool.model.is_of_model(name, wishes)
            and self.pool.model.is_among(self.key(number), wishes.among)
            and not self.pool.model.is_left_out(self.key(number), wishes.exclude)
            and (wishes.min_memory_mb or 0.0) * 0.93 <= total
            and wishes.node in {None, node}
            and (wishes.memory_mb or 0) <= percent * total / 100
        ]
        large = [node for node in set(fitting) if fitting.count(node) >= wishes.gpus]
        return bool(len(large) >= wishes.nodes)

    def _is_within_limits(self, asked: Any) -> bool:
        quota = self.pool.model.quota(asked.holder.owner)
        longest = [self.pool.settings.max_time_limit_s, quota.max_time_limit_s if quota else None]
        if any(limit is not None and (asked.time_limit_s or 0.0) > limit for limit in longest):
            return False
        if quota is not None and quota.max_priority is not None and asked.priority > quota.max_priority:
            return False
        of_groups = [group.quota for group in self.pool.model.groups.values() if asked.holder.owner in group.members]
        numbers = [number for number in (quota and quota.gpus, *of_groups) if number is not None]
        least = self.pool.model.least_weight(asked.wishes)
        return asked.preemptible or all(least <= number * 1000 for number in numbers)

    @rule(lease=leases)
    def request_again(self, lease: Any) -> None:
        lease_id, asked = lease
        known = self.pool.state.find(lease_id)
        before = [x.id for x in self.pool.model.leases.values()]
        self.pool.do(self.core.commands.RequestLease(lease_id, asked), self.now)
        if known is not None:
            assert [x.id for x in self.pool.model.leases.values() if x.id not in before] == []

    @rule(lease=leases)
    def renew(self, lease: Any) -> None:
        self.pool.do(self.core.commands.Renew((lease[0], "never heard of")), self.now)
        assert "never heard of" not in self.pool.state.leases

    @rule(lease=leases)
    def lose_client(self, lease: Any) -> None:
        self.pool.do(self.core.commands.ReportAbsence(lease[0]), self.now)

    @rule(
        lease=leases,
        how=st.sampled_from(["leave", "leave", "leave", "Release", "revoked", "holder_died", "expired"]),
    )
    def end(self, lease: Any, how: str) -> None:
        self.now += 0.2
        commands = self.core.commands
        if how in {"leave", "Release"}:
            command = commands.Release(lease[0], is_holder=how == "leave")
        else:
            command = commands.EndLease(lease[0], commands.EndReason(how))
        self.pool.do(command, self.now)
        assert lease[0] not in {x.id for x in self.pool.model.leases.values() if x.state != "draining"}

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 9.0, 14.0, 31.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.pool.do(self.core.commands.Tick(), self.now)

    @rule(seconds=st.sampled_from([0.5, 40.0]))
    def be_away(self, seconds: float) -> None:
        """The driver stands still, and says so before anything else."""
        self.now += seconds
        self.pool.do(self.core.commands.LoseTime(seconds), self.now)

    @rule(seconds=st.sampled_from([0.5, 20.0]))
    def set_the_clock_back(self, seconds: float) -> None:
        self.pool.do(self.core.commands.Tick(), self.now - seconds)

    @rule(number=gpu_numbers, out=st.booleans())
    def drain(self, number: int, out: bool) -> None:
        commands = self.core.commands
        command = commands.Configure("excluded", tuple(self.key(number)), "repair" if out else None)
        self.pool.do(command, self.now)

    @rule(ignore=st.booleans())
    def ignore_the_desktop(self, ignore: bool) -> None:
        commands = self.core.commands
        self.pool.do(commands.Configure("ignored_processes", ("Xorg",), "ada" if ignore else None), self.now)

    @rule(
        present=st.sampled_from([NODES, NODES, NODES[:1], ()]),
        rebooted=st.sampled_from([(), NODES[:1], NODES]),
        is_fleet=st.booleans(),
    )
    def restart(self, present: Sequence[str], rebooted: Sequence[str], is_fleet: bool) -> None:
        """Another driver takes over, and some of the nodes announce themselves at once."""
        self.takers += 1
        epoch = self.takers if is_fleet else 0
        self.pool.do(self.core.commands.TakeOver(epoch, f"driver{self.takers}", 0.0, self.wall), self.now)
        self.reboot(rebooted)
        self.announce(present)

    @rule(nodes=st.sampled_from([NODES, *zip(NODES, strict=True)]))
    def announce(self, nodes: Sequence[str]) -> None:
        for node in sorted({*nodes} & {*self.nodes}):
            self.pool.do(self.core.commands.AnnounceNode(node, f"boot{self.boots[node]}"), self.now)

    @rule(node=st.sampled_from(NODES))
    def silence(self, node: str) -> None:
        self.pool.do(self.core.commands.SilenceNode(node), self.now)
        assert node not in self.pool.state.announced

    def reboot(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self.boots[node] += 1

    @rule(node=st.sampled_from(NODES))
    def reboot_one(self, node: str) -> None:
        self.reboot([node])
        self.now += 1.0
        self.announce([node])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_replay()
