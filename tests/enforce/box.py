"""A box in a folder: devices made by mknod, as the drivers make them, and the files of /proc and /sys that say whose they are."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.other_user import python_as

NVIDIA, DRM = 195, 226
# As driver 550 has them, with a few of the lines that do not matter here.
INFORMATION = """\
Model: \t\t NVIDIA A100-SXM4-80GB
IRQ:   \t\t 140
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.03
Bus Location: \t 0000:{bus:02x}:00.0
Device Minor: \t {minor}
GPU Excluded:\t No
"""
PARAMS = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: {modify}\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: {mode}\n"
_OPEN = "import os\ntry: os.open({path!r}, os.O_RDWR)\nexcept OSError as error: print(error.errno)"


class Box:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "enforce.json"
        (root / "dev/dri").mkdir(parents=True)
        self.control = self.add_node("nvidiactl", 255)
        self.set_driver()

    def set_driver(self, *, modify: int = 1, mode: int = 0o666) -> None:
        self._write("proc/driver/nvidia/params", PARAMS.format(modify=modify, mode=mode))

    def add_nvidia(self, uuid: str, minor: int) -> Path:
        """The device of a GPU. It is that of no driver: opening it fails, with ENXIO where that is allowed."""
        bus = 0x40 - minor  # the order of the bus is another one than that of the minors
        text = INFORMATION.format(uuid=uuid, bus=bus, minor=minor)
        self._write(f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0/information", text)
        return self.add_node(f"nvidia{minor}", minor)

    def add_node(self, name: str, minor: int, *, major: int = NVIDIA) -> Path:
        path = self.root / "dev" / name
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        except PermissionError:
            pytest.skip("mknod is not allowed here: run the tests as root, and not in a container without CAP_MKNOD")
        path.chmod(0o666)
        return path

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextmanager
def make_box() -> Iterator[Box]:
    """A box that other users can reach, which pytest's own folders do not let them."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-box-") as folder:
        Path(folder).chmod(0o755)
        yield Box(Path(folder))


def can_open(uid: int, path: Path) -> bool:
    """Whether the kernel lets this user open a device: none is behind it (ENXIO), or permission is denied (EACCES)."""
    tried = subprocess.run(
        python_as(uid, "-c", _OPEN.format(path=str(path))), capture_output=True, text=True, check=True, cwd="/"
    )
    return {"": True, f"{errno.ENXIO}\n": True, f"{errno.EACCES}\n": False}[tried.stdout]
