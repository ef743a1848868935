"""Who may open each device, and what must change for that. Nothing here touches a device."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# An access control list as the kernel keeps it in `system.posix_acl_access`: a version, then a tag, permissions and an id for
# each entry (include/uapi/linux/posix_acl_xattr.h).
_HEAD: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")
_VERSION: Final = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF
_READ_WRITE: Final = 6
_ROOT: Final = 0
# What stat(2) shows of every list that is made here: the mask stands where the group's permissions are.
SHOWN_MODE: Final = 0o660


class Mode(StrEnum):
    """How far it goes: only log; also tell those who use a GPU without a lease; also refuse them."""

    OBSERVE = "observe"
    WARN = "warn"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a GPU. `owner` is the user of its file, and `acl` its list; None where it has only a mode."""

    uuid: str
    path: str
    owner: int = _ROOT
    mode: int = 0o666
    acl: bytes | None = None

    def is_open_to(self, uids: Collection[int]) -> bool:
        """Whether exactly these users and root may open it."""
        return self.acl == acl_for(uids, self.owner)


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """A user that holds a GPU."""

    uuid: str
    uid: int


@dataclass(frozen=True, slots=True)
class Change:
    """A device that must get another list, and the users that it lets in."""

    device: Device
    uids: frozenset[int]

    @property
    def acl(self) -> bytes:
        return acl_for(self.uids, self.device.owner)


def plan(
    devices: Sequence[Device], grants: Iterable[DeviceGrant], *, handed_out: Collection[str], always: Collection[int]
) -> list[Change]:
    """What must change so that a device of a GPU that the pool hands out is open to its holders and to the users that may
    `always` open it. A device of another GPU stays as it is.
    """
    holders: dict[str, set[int]] = {}
    for grant in grants:
        holders.setdefault(grant.uuid, set()).add(grant.uid)
    changes = []
    for device in devices:
        uids = frozenset(holders.get(device.uuid, ())) | frozenset(always)
        if device.uuid in handed_out and not device.is_open_to(uids):
            changes.append(Change(device, uids))
    return changes


def acl_for(uids: Collection[int], owner: int = _ROOT) -> bytes:
    """The list that lets in these users, and neither the group nor others. The user of the file is let in as any other is."""
    own = _READ_WRITE if owner == _ROOT or owner in uids else 0
    entries = [(_OWNER, own, _NO_ID), *((_USER, _READ_WRITE, uid) for uid in sorted(uids))]
    # The mask is there without users too: then the mode that is shown is always the same, and a driver that is told this
    # mode leaves the file alone.
    entries += [(_GROUP, 0, _NO_ID), (_MASK, _READ_WRITE, _NO_ID), (_OTHER, 0, _NO_ID)]
    return _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def resets_devices(parameters: Mapping[str, str]) -> bool:
    """Whether the NVIDIA driver's helper, nvidia-modprobe, gives a device its own mode again, by the driver's parameters: any
    user can have it run.
    """
    if parameters.get("ModifyDeviceFiles", "1") == "0":
        return False
    return parameters.get("DeviceFileMode", str(0o666)) != str(SHOWN_MODE)
