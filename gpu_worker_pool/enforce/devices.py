"""The devices of this machine's GPUs: which file is whose, and the access control lists on them.

The lists are written as the extended attribute that the kernel has them in: one call replaces a whole list, and no program
such as setfacl has to be installed or started. `nvidiactl`, `nvidia-uvm` and `kfd` are never touched: every program needs them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_worker_pool.failure import Failure
from gpu_worker_pool.gpus.amd import AmdProbe
from gpu_worker_pool.gpus.probe import ProbeUnavailable

from .plan import Change, Device

_ATTRIBUTE: Final = "system.posix_acl_access"
_FACT: Final = re.compile(r"^([\w ]+?):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
# Only a whole UUID names a GPU: a driver that no program uses shows question marks.
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{36}")
_HIGHEST_MINOR: Final = 254


def find_devices(root: Path = Path("/")) -> list[Device]:
    """The devices whose GPU is known. Failure where a file of one is something else."""
    return [_read(uuid, path) for uuid, path in (*_of_nvidia(root), *_of_amd(root)) if os.path.lexists(path)]


def _of_nvidia(root: Path) -> Iterator[tuple[str, Path]]:
    """The number of a device is its minor, which is not the index of its GPU."""
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        facts = facts_in(file)
        uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
        if _UUID.fullmatch(uuid) and minor.isdigit() and int(minor) <= _HIGHEST_MINOR:
            yield uuid, root / f"dev/nvidia{int(minor)}"


def _of_amd(root: Path) -> Iterator[tuple[str, Path]]:
    with suppress(ProbeUnavailable):
        for uuid, name in AmdProbe("", root=root).render_devices.items():
            yield uuid, root / "dev/dri" / name


def facts_in(file: Path) -> dict[str, str]:
    """The lines `Name: value` of a file; none where it cannot be read."""
    try:
        return dict(_FACT.findall(file.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return {}


def driver_parameters(root: Path = Path("/")) -> dict[str, str]:
    """The parameters of the NVIDIA driver; none where it is not loaded."""
    return facts_in(root / "proc/driver/nvidia/params")


def _read(uuid: str, path: Path) -> Device:
    found = path.lstat()
    if not stat.S_ISCHR(found.st_mode):
        raise Failure(
            f"{path} is not a device, and it stands where that of {uuid} should be: remove it, and load the driver again"
        )
    return Device(uuid, str(path), found.st_uid, stat.S_IMODE(found.st_mode), _acl(path))


def _acl(path: Path) -> bytes | None:
    try:
        return os.getxattr(path, _ATTRIBUTE, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise _unusable(str(path), error) from None


def apply(changes: Sequence[Change]) -> None:
    """Make all of these changes, or none: Failure where one cannot be made."""
    done: list[Device] = []
    try:
        for change in changes:
            os.setxattr(change.device.path, _ATTRIBUTE, change.acl, follow_symlinks=False)
            done.append(change.device)
    except OSError as error:
        for device in done:
            restore(device)
        raise _unusable(changes[len(done)].device.path, error) from None


def restore(device: Device) -> None:
    """Give a device the mode and the list that it had. One that is gone needs none."""
    with suppress(FileNotFoundError):
        if not stat.S_ISCHR(os.lstat(device.path).st_mode):
            return
        if device.acl is not None:
            os.setxattr(device.path, _ATTRIBUTE, device.acl, follow_symlinks=False)
        else:
            with suppress(OSError):  # it has none
                os.removexattr(device.path, _ATTRIBUTE, follow_symlinks=False)
        os.chmod(device.path, device.mode)  # noqa: PTH101 - beside the other calls


def _unusable(path: str, error: OSError) -> Failure:
    if error.errno == errno.ENOTSUP:
        return Failure(f"the file system of {path} has no access control lists: use the kernel's own /dev (devtmpfs)")
    return Failure(f"the access control list of {path} cannot be used: {error.strerror}; nothing was changed")
