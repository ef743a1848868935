"""Reads NVIDIA GPUs with NVML, the driver's own library, through nvidia-ml-py (imported as `pynvml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, Reading
from gpu_worker_pool.host.processes import ProcessTable

from .nvml_calls import Code, DriverGoneError, GpuFaultError, Nvml, NvmlError, RefusedError, fault_in_words
from .probe import Probe, ProbeResult, ProbeUnavailable

# How soon a driver that went away is tried again.
RETRY_S = 5.0

_BYTES_PER_MB = 2**20
_MILLIWATTS_PER_W = 1000
_UNNAMED = "NVIDIA GPU"
# NVML_P2P_STATUS_OK, and what is farther for GPUs without NVLink than any common ancestor is (NVML_TOPOLOGY_SYSTEM is 50).
_LINKED = 0
_UNLINKED = 100

# A device of NVML: an opaque pointer.
_Handle = Any


class NvmlProbe(Probe):
    """Reads all NVIDIA GPUs of this machine; with MIG on, the MIG devices instead of their GPU.

    A MIG device has the index `100 * (GPU's index + 1) + its position`, which no GPU has. A GPU that does not answer
    keeps its name, UUID and index. A driver that goes away is tried again every RETRY_S on the clock of `read`; until it is
    back, a result has an `error` and no readings.
    """

    source = "nvml"

    def __init__(self, node: str) -> None:
        self._node = node
        self._nvml = Nvml()
        self._slots: list[_Slot] = []
        # The GPUs whose topology was read last, and the positions that it gives them; none if it is unknown.
        self._placed: set[GpuKey] = set()
        self._positions: dict[GpuKey, int] = {}
        self._is_initialised = False
        self._is_closed = False
        self._error = ""
        self._retry_at: float | None = None
        try:
            self._start()
        except DriverGoneError as gone:
            self._stop()
            raise ProbeUnavailable(str(gone)) from None

    def read(self, at: float) -> ProbeResult:
        if self._is_closed:
            raise RuntimeError("this probe was closed; make a new one to read again")
        try:
            if self._retry_at is not None and at >= self._retry_at:
                self._retry_at = None
                self._stop()
                self._start()
            if not self._is_initialised:
                return ProbeResult((), self._error)
            readings = self._read_all(at)
        except DriverGoneError as gone:
            self._stop()
            self._retry_at = at + RETRY_S
            self._error = str(gone)
            return ProbeResult((), self._error)

        if self._slots and all(slot.fault for slot in self._slots):
            # The cause may be NVML. The GPUs are asked on until NVML is restarted.
            if self._retry_at is None:
                self._retry_at = at + RETRY_S
            return ProbeResult(readings, f"no GPU answers; the first of them: {self._slots[0].fault}")
        self._retry_at = None
        return ProbeResult(readings)

    def close(self) -> None:
        self._is_closed = True
        self._stop()

    def _start(self) -> None:
        self._nvml.demand_of_driver("nvmlInit")
        self._is_initialised = True
        self._open_all(self._count())

    def _stop(self) -> None:
        if self._is_initialised:
            self._is_initialised = False
            with suppress(NvmlError):  # it may be gone already
                self._nvml.demand("nvmlShutdown")

    def _count(self) -> int:
        return int(self._nvml.demand_of_driver("nvmlDeviceGetCount"))

    def _open_all(self, count: int) -> None:
        """Find the GPUs again. One that cannot be opened is taken for the one that was at its index before."""
        before = {slot.index: slot for slot in self._slots}
        found = [self._open(index, before.get(index)) for index in range(count)]
        present = {slot.gpu.key for slot in found if not slot.fault}
        for slot in found:
            known = before.get(slot.index)
            if slot.fault and known and known.gpu.key not in present:
                slot.gpu, slot.listed = known.gpu, known.listed
        self._place(found)
        self._slots = found

    def _open(self, index: int, before: _Slot | None) -> _Slot:
        try:
            handle = self._nvml.demand("nvmlDeviceGetHandleByIndex", index)
            uuid = self._nvml.demand("nvmlDeviceGetUUID", handle)
            name = self._nvml.ask("nvmlDeviceGetName", handle)
        except (GpuFaultError, RefusedError) as problem:
            unknown = Gpu(GpuKey(self._node, f"unknown-{index}"), index, _UNNAMED)
            return _Slot(index, unknown, (unknown,), fault=fault_in_words(problem, index))
        gpu = Gpu(GpuKey(self._node, uuid), index, name or _UNNAMED)
        listed = before.listed if before and before.gpu.key == gpu.key else (gpu,)
        return _Slot(index, gpu, listed, handle)

    def _place(self, slots: list[_Slot]) -> None:
        """Give the GPUs that answer their positions. Their topology is read once: each pair of them is asked for."""
        answering = [slot for slot in slots if not slot.fault]
        there = {slot.gpu.key for slot in answering}
        if there != self._placed:
            self._placed, self._positions = set(), {}
            with suppress(GpuFaultError):  # the next reading says so, and after it the topology is read again
                self._positions = self._read_topology(answering)
                self._placed = there
        for slot in answering:
            slot.put(self._positions.get(slot.gpu.key))

    def _read_topology(self, slots: list[_Slot]) -> dict[GpuKey, int]:
        """The positions of these GPUs: by NVLink, where that is known, and by what they share of PCIe and NUMA; none if that is
        unknown of a pair.
        """
        ancestors: dict[tuple[int, int], int | None] = {}
        links: dict[tuple[int, int], int | None] = {}
        nvlink = self._nvml.constant("NVML_P2P_CAPS_INDEX_NVLINK")
        for (number, one), (other_number, other) in combinations(enumerate(slots), 2):
            pair, handles = (number, other_number), (one.handle, other.handle)
            ancestors[pair] = self._nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *handles)
            links[pair] = self._nvml.ask("nvmlDeviceGetP2PStatus", *handles, nvlink)
        knows_links = None not in links.values()
        distances: dict[tuple[int, int], int] = {}
        for pair, ancestor in ancestors.items():
            if ancestor is None:
                return {}
            is_linked = knows_links and links[pair] == _LINKED
            distances[pair] = ancestor if is_linked else ancestor + _UNLINKED
        if not distances:
            return {}  # one GPU has no neighbours
        found = positions(len(slots), distances)
        return {slot.gpu.key: found[number] for number, slot in enumerate(slots)}

    def _mig_devices(self, slot: _Slot) -> list[tuple[Gpu, _Handle]] | None:
        """The MIG devices of a GPU; None if MIG is off. Listed at every read: a handle does not outlive its device."""
        mode = self._nvml.ask("nvmlDeviceGetMigMode", slot.handle)
        if not mode or not mode[0]:
            return None
        known = {(gpu.key.uuid, gpu.index): gpu for gpu in slot.listed}
        devices = []
        for position in range(self._nvml.ask("nvmlDeviceGetMaxMigDeviceCount", slot.handle) or 0):
            handle = self._nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", slot.handle, position)
            uuid = handle and self._nvml.ask("nvmlDeviceGetUUID", handle)
            if not uuid:
                continue
            index = 100 * (slot.index + 1) + position
            gpu = known.get((uuid, index))
            if gpu is None:
                name = self._nvml.ask("nvmlDeviceGetName", handle) or f"{slot.gpu.name} MIG"
                gpu = Gpu(GpuKey(self._node, uuid), index, name)
            devices.append((gpu, handle))
        return devices

    def _read_all(self, at: float) -> tuple[Reading, ...]:
        count = self._count()
        if count != len(self._slots) or any(slot.fault for slot in self._slots):
            self._open_all(count)
        processes = ProcessTable()
        return tuple(reading for slot in self._slots for reading in self._read_slot(slot, at, processes))

    def _read_slot(self, slot: _Slot, at: float, processes: ProcessTable) -> list[Reading]:
        if slot.fault is None:
            try:
                return self._read_devices(slot, at, processes)
            except GpuFaultError as fault:
                slot.fault = fault_in_words(fault, slot.index)
        return [Reading(gpu, at, fault=slot.fault) for gpu in slot.listed]

    def _read_devices(self, slot: _Slot, at: float, processes: ProcessTable) -> list[Reading]:
        devices = self._mig_devices(slot)
        if devices is None:
            slot.listed = (slot.gpu,)
            return [self._read(slot.gpu, slot.handle, slot.handle, at, processes)]
        if not devices:
            slot.listed = (slot.gpu,)
            fault = f"MIG is on and no MIG device is there: make one (nvidia-smi mig -i {slot.index} -cgi …) or switch MIG off"
            return [Reading(slot.gpu, at, fault=fault)]
        readings = [self._read(gpu, handle, slot.handle, at, processes) for gpu, handle in devices]
        slot.listed = tuple(gpu for gpu, _ in devices)
        return readings

    def _read(self, gpu: Gpu, handle: _Handle, chip: _Handle, at: float, processes: ProcessTable) -> Reading:
        """Read a chip or one of its MIG devices. These share its temperature and have no power of their own."""
        is_chip = handle is chip
        total_mb, used_mb = self._memory_mb(handle)
        return Reading(
            gpu=gpu,
            at=at,
            memory_total_mb=total_mb,
            memory_used_mb=used_mb,
            utilization_percent=self._utilization_percent(handle),
            has_utilization=is_chip,
            temperature_c=self._temperature_c(chip),
            power_draw_w=self._watts("nvmlDeviceGetPowerUsage", handle) if is_chip else None,
            power_limit_w=self._watts("nvmlDeviceGetEnforcedPowerLimit", handle) if is_chip else None,
            processes=self._processes(handle, processes),
        )

    def _memory_mb(self, handle: _Handle) -> tuple[float | None, float | None]:
        """Total and used. The total includes what the driver reserves; as of version 2, the used does not."""
        version = self._nvml.constant("nvmlMemory_v2")
        memory = self._nvml.ask_first(("nvmlDeviceGetMemoryInfo", handle, version), ("nvmlDeviceGetMemoryInfo", handle))
        if memory is None or not memory.total:
            return None, None
        used_mb = memory.used / _BYTES_PER_MB if memory.used <= memory.total else None
        return memory.total / _BYTES_PER_MB, used_mb

    def _utilization_percent(self, handle: _Handle) -> float | None:
        rates = self._nvml.ask("nvmlDeviceGetUtilizationRates", handle)
        return float(rates.gpu) if rates is not None and rates.gpu <= 100 else None

    def _watts(self, name: str, handle: _Handle) -> float | None:
        milliwatts = self._nvml.ask(name, handle)
        return None if milliwatts is None else milliwatts / _MILLIWATTS_PER_W

    def _temperature_c(self, handle: _Handle) -> float | None:
        sensor = self._nvml.constant("NVML_TEMPERATURE_GPU")
        degrees = self._nvml.ask_first(
            # NVML is going to drop the second; older drivers do not have the first.
            ("nvmlDeviceGetTemperatureV", handle, sensor),
            ("nvmlDeviceGetTemperature", handle, sensor),
        )
        return None if degrees is None else float(degrees)

    def _processes(self, handle: _Handle, table: ProcessTable) -> tuple[GpuProcess, ...] | None:
        """The compute and graphics processes; None if either list is unknown, because a process may be missing then."""
        computing = self._running("Compute", handle, where_not_supported=None)
        drawing = self._running("Graphics", handle, where_not_supported=())
        if computing is None or drawing is None:
            return None
        memory_mb: dict[int, float | None] = {}
        for process in (*computing, *drawing):
            held_mb = None if process.usedGpuMemory is None else process.usedGpuMemory / _BYTES_PER_MB
            # A process that does both is in both lists, with all of its memory in each.
            known = [mb for mb in (memory_mb.get(process.pid), held_mb) if mb is not None]
            memory_mb[process.pid] = max(known, default=None)
        # Pid 0 is a process that the driver hides, in another container for example.
        return tuple(table.gpu_process(pid, memory_mb[pid]) for pid in sorted(memory_mb) if pid)

    def _running(self, kind: str, handle: _Handle, where_not_supported: Sequence[Any] | None) -> Sequence[Any] | None:
        calls = [(f"nvmlDeviceGet{kind}RunningProcesses_v{version}", handle) for version in (3, 2)]
        try:
            found: Sequence[Any] = self._nvml.demand_first(*calls)
        except RefusedError as refused:
            return where_not_supported if refused.code == Code.NOT_SUPPORTED else None
        return found


@dataclass(slots=True)
class _Slot:
    """One GPU in the machine. `listed` is the GPU itself or its MIG devices, as last seen."""

    index: int
    gpu: Gpu
    listed: tuple[Gpu, ...]
    handle: _Handle = None
    fault: str | None = None

    def put(self, position: int | None) -> None:
        gpu = replace(self.gpu, position=position)
        self.listed = tuple(gpu if each.key == gpu.key else each for each in self.listed)
        self.gpu = gpu


# --- the GPUs on a line: those with a fast link between them are close ------------------------------------------------------
#
# GPUs that are all near each other are an island: those on one PCIe switch, for example. Islands make larger islands: those of
# one NUMA node. The closest GPUs have the same position, and the gap between two islands is wider than either of them. So a
# choice of the closest positions stays on an island as long as it has room there.

# How far two GPUs are from each other, by their numbers, the lower one first.
_Distances = Mapping[tuple[int, int], int]
# The GPUs of an island, with their positions on it.
_Island = dict[int, int]


def positions(number: int, distances: _Distances) -> _Island:
    """The positions of this number of GPUs."""
    islands: list[_Island] = [{gpu: 0} for gpu in range(number)]
    gap = 0
    for farthest in sorted(set(distances.values())):
        groups: list[list[_Island]] = []
        for island in islands:
            near = (group for group in groups if all(_are_near(island, each, distances, farthest) for each in group))
            group = next(near, None)
            if group is None:
                groups.append([island])
            else:
                group.append(island)
        islands = [_in_a_row(group, gap) for group in groups]
        gap = max(max(island.values()) for island in islands) + 1
    return _in_a_row(islands, gap)


def _are_near(one: _Island, other: _Island, distances: _Distances, farthest: int) -> bool:
    return all(distances[min(a, b), max(a, b)] <= farthest for a in one for b in other)


def _in_a_row(islands: list[_Island], gap: int) -> _Island:
    row: _Island = {}
    start = 0
    for island in islands:
        row |= {gpu: start + position for gpu, position in island.items()}
        start += max(island.values()) + gap
    return row
