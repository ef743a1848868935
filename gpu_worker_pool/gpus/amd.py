"""Reads AMD GPUs from the files of the kernel's amdgpu driver. No library of ROCm is needed.

- /sys/class/drm/card*/device: memory, utilization, unique id, and hwmon for temperature and power
  (Documentation/gpu/amdgpu/driver-misc.rst and thermal.rst of Linux)
- /sys/class/kfd/kfd: the number by which ROCm knows a GPU, and the memory of each compute process
- /proc/PID/fdinfo: the memory of processes that draw or use Vulkan (Documentation/gpu/drm-usage-stats.rst)

What a file does not say is unknown. A driver that resets a GPU answers with errors for a while, and hidden files are common
in containers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, Reading
from gpu_worker_pool.host.processes import ProcessTable

from .grant_env import NAMED_BY_PLACE
from .probe import Probe, ProbeResult, ProbeUnavailable

_VENDOR: Final = 0x1002
_UNNAMED: Final = "AMD GPU"
_BYTES_PER_MB: Final = 2**20
_MICROWATTS_PER_W: Final = 1e6
_MILLIDEGREES_PER_C: Final = 1000
# A GPU with no more memory of its own than this is a part of the processor, which keeps that much of the machine's memory
# for it. It is not handed out.
_INTEGRATED_BYTES: Final = 4 * 2**30
# The whole of /proc is searched this often for processes that draw; compute processes are read each time.
_SEARCH_S: Final = 5.0
_CARD: Final = re.compile(r"card[0-9]+")
# `drm-memory-vram: 1024 KiB`
_FACT: Final = re.compile(r"^(drm-[\w-]+):\s*(.*?)\s*$", re.MULTILINE)
_SIZE: Final = re.compile(r"(\d+)\s*(\w*)")
_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# The sensor at the edge of the chip is what other tools show; some chips have only the hottest point.
_SENSORS: Final = ("edge", "junction")
# Memory in bytes, by the process that has it, for each GPU by its address; None where a process may be missing.
_Held = dict[int, int]
_OnGpus = dict[str, _Held | None]


@dataclass(frozen=True, slots=True)
class _Card:
    """A GPU, and the folder of its device."""

    gpu: Gpu
    address: str
    device: Path
    node: _KfdNode


@dataclass(frozen=True, slots=True)
class _KfdNode:
    """A GPU as ROCm knows it: `position` is that among all GPUs of ROCm, by which ROCR_VISIBLE_DEVICES counts. The rest is
    unknown where KFD does not show the GPU.
    """

    position: int
    kfd_id: int | None = None
    unique_id: int | None = None
    # As how many GPUs ROCm shows it (the modes DPX to CPX).
    parts: int = 1


class AmdProbe(Probe):
    """Reads all AMD GPUs of this machine that have memory of their own. Their indices are those of ROCm, from `first_index` on.

    A GPU that disappears, or whose driver answers nothing, is reported with a fault. `root` is for tests.
    """

    source = "amdgpu"

    def __init__(self, node: str, *, first_index: int = 0, root: Path = Path("/")) -> None:
        self._node, self._first_index, self._root = node, first_index, root
        self._cards: dict[str, _Card] = {}
        self._drawing: dict[str, _Held] = {}
        self._search_at = float("-inf")
        devices = self._devices()
        self._find(devices)
        if not self._cards:
            raise ProbeUnavailable(_why_none(devices))

    def __repr__(self) -> str:
        return f"<AmdProbe of {self._node!r}: {len(self._cards)} GPUs>"

    @property
    def addresses(self) -> frozenset[str]:
        """Their places on the PCI bus."""
        return frozenset(self._cards)

    @property
    def render_devices(self) -> dict[str, str]:
        """The name in /dev/dri by which programs compute on each GPU, by its UUID."""
        return {
            card.gpu.key.uuid: entry.name
            for card in self._cards.values()
            for entry in _entries(card.device / "drm")
            if entry.name.startswith("renderD")
        }

    def read(self, at: float) -> ProbeResult:
        devices = self._devices()
        if devices.keys() - self._cards.keys():
            self._find(devices)
        processes = self._processes(at)
        table = ProcessTable(self._root / "proc")
        readings = [self._read(card, at, processes, table) for card in self._cards.values()]
        readings.sort(key=lambda reading: reading.gpu.index)
        if all(reading.fault for reading in readings):
            return ProbeResult(tuple(readings), f"no AMD GPU answers; the first of them: {readings[0].fault}")
        return ProbeResult(tuple(readings))

    def close(self) -> None:
        """Nothing: no file stays open."""

    # --- which GPUs there are --------------------------------------------------------------------------------------------

    def _devices(self) -> dict[str, Path]:
        """The folder of each device that has the driver, by its PCI address."""
        found = {}
        for card in _entries(self._root / "sys/class/drm"):
            device = card / "device"
            # Other entries are connectors of a card.
            if _CARD.fullmatch(card.name) and _number(device / "vendor", 16) == _VENDOR and _driver(device) == "amdgpu":
                found[device.resolve().name] = device
        return found

    def _find(self, devices: Mapping[str, Path]) -> None:
        """Find new GPUs. Those that are known stay as they are. One whose memory is not known yet may be integrated."""
        nodes = self._kfd_nodes()
        # Those that ROCm numbers first: their indices are its numbers.
        for address, device in sorted(devices.items(), key=lambda item: (item[0] not in nodes, item[0])):
            total = _number(device / "mem_info_vram_total")
            if address in self._cards or total is None or total <= _INTEGRATED_BYTES:
                continue
            node = nodes.get(address, _KfdNode(0))
            index, taken = self._first_index + node.position, {card.gpu.index for card in self._cards.values()}
            while index in taken:
                index += 1
            unique_id = _number(device / "unique_id", 16) or node.unique_id
            if unique_id is None and _is_refused(device / "unique_id"):
                continue  # under another name it would be another GPU, and could be granted twice
            key = GpuKey(self._node, _uuid(address, unique_id))
            self._cards[address] = _Card(Gpu(key, index, self._name(device)), address, device, node)

    def _kfd_nodes(self) -> dict[str, _KfdNode]:
        """The GPUs of ROCm by their PCI address."""
        found: dict[str, _KfdNode] = {}
        numbers = [entry for entry in _entries(self._root / "sys/class/kfd/kfd/topology/nodes") if entry.name.isdigit()]
        position = 0
        for folder in sorted(numbers, key=lambda entry: int(entry.name)):
            if not (kfd_id := _number(folder / "gpu_id")):
                continue  # a processor, or a GPU that this container must not use
            text = _text(folder / "properties") or ""
            properties = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
            place = properties.get("location_id", 0)
            where = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            known = found.get(where) or _KfdNode(position, kfd_id, properties.get("unique_id"), parts=0)
            found[where] = replace(known, parts=known.parts + 1)
            position += 1
        return found

    def _name(self, device: Path) -> str:
        """The name that the board has, else that of the model in libdrm's list."""
        if name := _text(device / "product_name"):
            return name
        model, revision = _number(device / "device", 16), _number(device / "revision", 16)
        listed = _text(self._root / "usr/share/libdrm/amdgpu.ids") or ""
        if model is not None and revision is not None:
            # `744C,	C8,	AMD Radeon RX 7900 XTX`
            found = re.search(rf"^{model:04X},\s*{revision:02X},\s*(.+)$", listed, re.MULTILINE | re.IGNORECASE)
            if found:
                return found[1].strip()
        return _UNNAMED

    # --- what they do ----------------------------------------------------------------------------------------------------

    def _read(self, card: _Card, at: float, processes: _OnGpus | None, table: ProcessTable) -> Reading:
        device = card.device
        if _number(device / "vendor", 16) != _VENDOR:
            return Reading(card.gpu, at, fault="it has gone: its driver was removed, or it fell off the bus")
        if card.node.parts > 1:
            return Reading(
                card.gpu,
                at,
                fault=f"it is split into {card.node.parts} parts, which cannot be handed out; set its compute partition to SPX",
            )
        total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
        busy = _number(device / "gpu_busy_percent")
        if total is used is busy is None:
            return Reading(card.gpu, at, fault="its driver answers nothing: it is being reset, or hangs (see dmesg)")
        sensors = next((entry for entry in _entries(device / "hwmon") if entry.name.startswith("hwmon")), None)
        return Reading(
            gpu=card.gpu,
            at=at,
            memory_total_mb=total / _BYTES_PER_MB if total else None,
            memory_used_mb=None if used is None or (total is not None and used > total) else used / _BYTES_PER_MB,
            utilization_percent=None if busy is None or not 0 <= busy <= 100 else float(busy),
            temperature_c=_temperature_c(sensors),
            power_draw_w=_watts(sensors, "power1_average", "power1_input"),
            power_limit_w=_watts(sensors, "power1_cap") or None,
            processes=_listed(processes, card.address, table),
        )

    def _processes(self, at: float) -> _OnGpus | None:
        """The processes on each GPU; None where one may be missing on any of them."""
        computing = self._computing()
        if at >= self._search_at:
            self._search_at, self._drawing = at + _SEARCH_S, self._search()
        # Only root sees the files of other users' processes; without KFD that would be all there is to see.
        if computing is None and os.geteuid() != 0:
            return None
        found = computing or {}
        for address, held in self._drawing.items():
            on_gpu = found.setdefault(address, {})
            if on_gpu is not None:
                # A process that does both has all of its memory in one of the two, by the version of the driver.
                on_gpu.update({pid: max(on_gpu.get(pid, 0), size) for pid, size in held.items()})
        return found

    def _computing(self) -> _OnGpus | None:
        """The compute processes of all users; None where KFD does not show them."""
        folder = self._root / "sys/class/kfd/kfd/proc"
        if not folder.is_dir():
            return None
        found: _OnGpus = {card.address: {} for card in self._cards.values()}
        for process in (entry for entry in _entries(folder) if entry.name.isdigit()):
            for card in self._cards.values():
                file, held = process / f"vram_{card.node.kfd_id}", found[card.address]
                size = _number(file)
                if size is None and _is_refused(file):
                    found[card.address] = None
                elif size and held is not None:  # it has this file for GPUs that it does not use, too
                    held[int(process.name)] = size
        return found

    def _search(self) -> dict[str, _Held]:
        found: dict[str, _Held] = {}
        for folder in _entries(self._root / "proc"):
            if folder.name.isdigit():
                for address, size in _drawn_by(folder):
                    held = found.setdefault(address, {})
                    held[int(folder.name)] = held.get(int(folder.name), 0) + size
        return found


def _why_none(devices: Mapping[str, Path]) -> str:
    if not devices:
        return (
            "no AMD GPU has the amdgpu driver; on a box with one install the driver, in a container pass /dev/kfd, /dev/dri and "
            "/sys in"
        )
    if any(_number(device / "mem_info_vram_total") is None for device in devices.values()):
        return "the amdgpu driver does not say how much memory its GPU has: it is being reset, or /sys is hidden"
    if any(_is_refused(device / "unique_id") for device in devices.values()):
        return "the amdgpu driver does not say which GPU it has (unique_id): it is being reset"
    return "the AMD GPU of this machine has no memory of its own (it is a part of the processor)"


def _drawn_by(process: Path) -> Iterator[tuple[str, int]]:
    """The memory of a process on each GPU, by the GPU's address. What it has open several times counts once."""
    seen = set()
    try:
        names = os.listdir(f"{process}/fd")  # noqa: PTH208 - a box has very many open files, and a Path for each takes long
    except OSError:
        return  # it has ended, or is another user's
    for name in names:
        try:
            is_gpu = os.readlink(f"{process}/fd/{name}").startswith("/dev/dri/")  # noqa: PTH115 - the same
        except OSError:
            continue  # closed meanwhile
        if not is_gpu:
            continue
        facts = dict(_FACT.findall(_text(process / "fdinfo" / name) or ""))
        client = (facts.get("drm-pdev", ""), facts.get("drm-client-id", ""))
        # The second name is that of newer drivers.
        size = _SIZE.fullmatch(facts.get("drm-memory-vram") or facts.get("drm-resident-vram") or "")
        if all(client) and client not in seen and size and int(size[1]):
            seen.add(client)
            yield client[0], int(size[1]) * _UNITS.get(size[2], 1)


def _listed(processes: _OnGpus | None, address: str, table: ProcessTable) -> tuple[GpuProcess, ...] | None:
    held = None if processes is None else processes.get(address, {})
    if held is None:
        return None
    return tuple(table.gpu_process(pid, held[pid] / _BYTES_PER_MB) for pid in sorted(held))


def _uuid(address: str, unique_id: int | None) -> str:
    """As ROCm writes it. A GPU without a unique id is known by its place, and ROCm knows it by its position only."""
    return f"GPU-{unique_id:016x}" if unique_id else f"{NAMED_BY_PLACE}{address.replace(':', '-')}"


def _temperature_c(sensors: Path | None) -> float | None:
    if sensors is None:
        return None
    by_label = {_text(label): label for label in sensors.glob("temp*_label")}
    for name in _SENSORS:
        if name in by_label:
            degrees = _number(by_label[name].with_name(by_label[name].name.replace("_label", "_input")))
            return None if degrees is None else degrees / _MILLIDEGREES_PER_C
    degrees = _number(sensors / "temp1_input")
    return None if degrees is None else degrees / _MILLIDEGREES_PER_C


def _watts(sensors: Path | None, *names: str) -> float | None:
    """The first of these that is there: older drivers have an average, newer ones a momentary value."""
    values = (None if sensors is None else _number(sensors / name) for name in names)
    return next((value / _MICROWATTS_PER_W for value in values if value is not None and value >= 0), None)


def _driver(device: Path) -> str | None:
    try:
        return (device / "driver").resolve(strict=True).name
    except OSError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    """None where it is missing, hidden, empty, or the driver answers with an error."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _is_refused(path: Path) -> bool:
    """Whether it is there and cannot be read, as while the driver resets its GPU."""
    try:
        path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return False


def _number(path: Path, base: int = 10) -> int | None:
    with suppress(ValueError):
        return int(_text(path) or "", base)
    return None
