"""A tree of files as the amdgpu driver of Linux 6.8 has it: Documentation/gpu/amdgpu/driver-misc.rst and thermal.rst,
Documentation/gpu/drm-usage-stats.rst, and the topology of KFD as ROCm's libhsakmt reads it (src/topology.c).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

GB = 2**30
MI300X = {"product_name": "AMD Instinct MI300X OAM", "device": "0x74a1", "revision": "0x00"}
# Consumers' cards have no product name. The list of libdrm has it.
RX7900 = {"product_name": "", "device": "0x744c", "revision": "0xc8"}
LIBDRM = "# List of AMDGPU IDs\n1.0.0\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n744C,\tCC,\tAMD Radeon RX 7900 XT\n"


@dataclass(frozen=True)
class AmdCard:
    """A card in the tree. `folder` is that of its device."""

    folder: Path
    address: str
    kfd_id: int

    def set(self, **files: str | int | None) -> None:
        """Write files of the device; None removes one."""
        for name, content in files.items():
            path = self.folder / name
            if content is None:
                path.unlink()
            else:
                path.write_text(f"{content}\n", encoding="ascii")

    def set_sensors(self, **files: str | int | None) -> None:
        AmdCard(self.folder / "hwmon/hwmon3", "", 0).set(**files)

    def refuse(self, *names: str) -> None:
        """Have the driver answer reads of these files with an error, as while it resets the GPU."""
        for name in names:
            (self.folder / name).unlink()
            (self.folder / name).mkdir()  # EISDIR in place of EPERM or ENODEV


class AmdTree:
    def __init__(self, root: Path, *, has_kfd: bool = True) -> None:
        self.root = root
        self.has_kfd = has_kfd
        self._write("usr/share/libdrm/amdgpu.ids", LIBDRM)
        (root / "sys/bus/pci/drivers/amdgpu").mkdir(parents=True)
        (root / "sys/class/drm").mkdir(parents=True)
        (root / "proc").mkdir(exist_ok=True)
        self._nodes = 0
        if has_kfd:
            (root / "sys/class/kfd/kfd/proc").mkdir(parents=True)
            self._add_node(0, "cpu_cores_count 64\nsimd_count 0\n")

    def add_card(
        self,
        bus: int,
        *,
        vram: int = 192 * GB,
        unique_id: int | None = 0x5AFD2FF3C7A4C1D8,
        model: dict[str, str] = MI300X,
        vendor: str = "0x1002",
    ) -> AmdCard:
        """A card on this bus, with its node of KFD."""
        address, kfd_id = f"0000:{bus:02x}:00.0", 51000 + bus
        folder = self.root / f"sys/devices/pci0000:00/{address}"
        (folder / "hwmon/hwmon3").mkdir(parents=True)
        (folder / "driver").symlink_to(self.root / "sys/bus/pci/drivers/amdgpu")
        card = AmdCard(folder, address, kfd_id)
        card.set(vendor=vendor, **model, mem_info_vram_total=vram, mem_info_vram_used=GB // 2, gpu_busy_percent=7)
        if unique_id is not None:
            card.set(unique_id=f"{unique_id:016x}")
        card.set_sensors(
            name="amdgpu", temp1_label="edge", temp1_input=41000, temp2_label="junction", temp2_input=47000
        )
        card.set_sensors(power1_average=140_000_000, power1_cap=750_000_000)
        number = len(list((self.root / "sys/class/drm").iterdir()))
        for name in (f"card{number}", f"card{number}-DP-1"):
            (self.root / f"sys/class/drm/{name}").mkdir()
            (self.root / f"sys/class/drm/{name}/device").symlink_to(folder)
        if self.has_kfd:
            known = f"unique_id {unique_id or 0}\nlocation_id {bus << 8}\ndomain 0\ndrm_render_minor {128 + number}\n"
            self._add_node(kfd_id, f"cpu_cores_count 0\nsimd_count 1216\n{known}")
        return card

    def add_partitions(self, card: AmdCard, number: int) -> None:
        """More nodes of KFD at the place of this card, as in the modes DPX to CPX."""
        for part in range(number):
            self._add_node(
                card.kfd_id + 1000 + part, f"simd_count 152\nlocation_id {int(card.address[5:7], 16) << 8}\ndomain 0\n"
            )

    def remove(self, card: AmdCard) -> None:
        shutil.rmtree(card.folder)

    def add_process(self, pid: int, *, computes: dict[AmdCard, int] | None = None, draws: str | None = None) -> None:
        """A process with this number of bytes on these cards by KFD, and with a file of a card that shows this."""
        fields = ["S", "1", *["0"] * 15, "1", "0", str(1000 + pid), *["0"] * 20]
        self._write(f"proc/{pid}/stat", f"{pid} (python) {' '.join(fields)}\n")
        for card, size in (computes or {}).items():
            self._write(f"sys/class/kfd/kfd/proc/{pid}/vram_{card.kfd_id}", str(size))
        if draws is not None:
            (self.root / f"proc/{pid}/fd").mkdir()
            for number in (7, 8):  # a duplicate of one file counts once
                (self.root / f"proc/{pid}/fd/{number}").symlink_to("/dev/dri/renderD128")
                self._write(f"proc/{pid}/fdinfo/{number}", draws)
            (self.root / f"proc/{pid}/fd/9").symlink_to("/dev/null")

    def _add_node(self, kfd_id: int, properties: str) -> None:
        folder = f"sys/class/kfd/kfd/topology/nodes/{self._nodes}"
        self._write(f"{folder}/gpu_id", str(kfd_id))
        self._write(f"{folder}/properties", properties)
        self._nodes += 1

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
