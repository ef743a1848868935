"""Follows the server, and lets only the holders of each GPU open its device.

It fails static: while the server is away, or a list cannot be written, the devices stay as they are. It ends as static: the
next one takes over from the file that says how the devices were, and `stop` makes them so again.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import select
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.host.enforcement import read_enforcement, state_file
from gpu_worker_pool.host.processes import PROC, read_process, read_uids
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.wire.pool import PoolGpu, PoolProcess

from .devices import apply, driver_parameters, find_devices, restore
from .plan import Change, Device, DeviceGrant, Mode, plan, resets_devices
from .server import Holdings, PoolServer, ServerAway

logger = logging.getLogger(__name__)

# How often the devices are looked at where nothing is heard of the server: a driver's helper may have opened them again.
LOOK_S: Final = 1.0
_STOPS_WITHIN_S: Final = 15.0
_TERMINAL: Final = re.compile(r"/dev/(pts/|tty)\d+")
_UNNAMED_USER: Final = re.compile(r"uid-(\d{1,10})")
ADVICE_ON_RESETS: Final = (
    "nvidia-modprobe, which any user can have run, opens the devices to all again; they are shut within a second. Load the driver "
    "with `options nvidia NVreg_DeviceFileGID=GID NVreg_DeviceFileMode=0660` (all who use GPUs in the group GID), or with "
    "`NVreg_ModifyDeviceFiles=0` where your system makes the devices itself"
)


@dataclass(slots=True)
class _State:
    """What is kept for the next one, for `stop`, and for all who look: how the devices were before."""

    mode: Mode
    devices: dict[str, str] = field(default_factory=dict)
    before: dict[str, Device] = field(default_factory=dict)

    def save(self) -> None:
        seen = read_process(PROC, os.getpid())
        before = {
            path: [device.uuid, device.owner, device.mode, None if device.acl is None else device.acl.hex()]
            for path, device in self.before.items()
        }
        said = {
            "mode": self.mode,
            "pid": os.getpid(),
            "started": None if seen is None else seen.id.started,
            "devices": self.devices,
            "before": before,
        }
        file = state_file()
        draft = file.with_name(f"{file.name}~")
        draft.write_text(json.dumps(said), encoding="utf-8")
        draft.chmod(0o644)
        draft.replace(file)


def _devices_before() -> dict[str, Device]:
    """The devices that were changed, as they were; Failure where the file that says so cannot be read."""
    file = state_file()
    try:
        said: dict[str, Any] = json.loads(file.read_bytes())
        return {
            path: Device(uuid, path, owner, mode, None if acl is None else bytes.fromhex(acl))
            for path, (uuid, owner, mode, acl) in said["before"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Failure(
            f"{file} cannot be read, and has how the devices were: move it away, and set their modes by hand"
        ) from None


def stop() -> list[str]:
    """End the one that runs, and give the devices their modes and lists back; which they are. Failure where none has run."""
    running = read_enforcement()
    if running is None:
        raise Failure("no `gpu-pool enforce` has run here, so there is nothing to restore", REFUSED)
    if running.is_running:
        with suppress(ProcessLookupError):
            _end(running.pid)
    before = _devices_before()
    for device in before.values():
        restore(device)
    state_file().unlink(missing_ok=True)
    return sorted(before)


def _end(pid: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], _STOPS_WITHIN_S)[0]:
            raise Failure(
                f"pid {pid}, which enforces, has not ended within {_STOPS_WITHIN_S:g} s; end it, and try again"
            )
    finally:
        os.close(handle)


class Enforcer:
    """Enforces what one server hands out. `allowed` may open every device."""

    def __init__(
        self, server: PoolServer, mode: Mode, *, allowed: Collection[int] = (), root: Path = Path("/")
    ) -> None:
        """Failure where another one runs, or a device cannot be enforced; nothing is changed then."""
        if (other := read_enforcement()) is not None and other.is_running:
            raise Failure(f"pid {other.pid} enforces here already; `gpu-pool enforce --stop` ends it", REFUSED)
        self._server, self._mode, self._root = server, mode, root
        self._allowed = frozenset(allowed)
        self._state = _State(mode, before=_devices_before())
        self._handed_out: set[str] = set()
        self._facts: Holdings | None = None
        self._uids: dict[str, int] = {}
        # What each device was given last, and what is said once.
        self._given: dict[str, bytes] = {}
        self._told: set[object] = set()
        self._is_stopping = False
        devices = find_devices(root)
        if not devices:
            raise Failure(
                "there is no device of a GPU here: load the driver first, and start a program that uses it (nvidia-smi), "
                "so that it shows the UUIDs"
            )
        self._state.devices = {device.uuid: device.path for device in devices}

    def run(self) -> None:
        """Follow the server until `end`."""
        if self._mode is not Mode.DENY:
            for device in self._state.before.values():
                restore(device)
            self._state.before.clear()
        elif resets_devices(driver_parameters(self._root)) and any("/nvidia" in path for path in self._paths):
            logger.warning("%s", ADVICE_ON_RESETS)
        self._state.save()
        logger.info("%s: %s", self._mode, ", ".join(self._paths))
        while not self._is_over():
            try:
                for _ in self._server.changes(LOOK_S):
                    self.enforce(self._server.ask())
                    if self._is_over():
                        return
            except ServerAway as away:
                self._say_once(logging.WARNING, "the server is away, so nothing changes: %s", away)
            if self._facts is not None:
                self.enforce(self._facts)
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Let `run` return soon. The devices stay as they are."""
        self._is_stopping = True

    def _is_over(self) -> bool:
        return self._is_stopping

    @property
    def _paths(self) -> list[str]:
        return list(self._state.devices.values())

    def enforce(self, facts: Holdings) -> None:
        """Do what the mode says about this. What cannot be done is logged, and tried again; at first it is a Failure."""
        is_first, self._facts = self._facts is None, facts
        try:
            self._set(facts)
        except Failure as failure:
            if is_first:
                raise
            self._say_once(logging.ERROR, "%s", failure)
        self._look_for_outsiders(facts.gpus)

    def _set(self, facts: Holdings) -> None:
        devices = find_devices(self._root)
        # A GPU that the server does not see for a while stays shut.
        self._handed_out |= {gpu.uuid for gpu in facts.gpus}
        grants = [DeviceGrant(uuid, uid) for uuid, owner in facts.owners if (uid := self._uid_of(owner)) is not None]
        always = self._allowed | {facts.server_uid}
        changes = plan(devices, grants, handed_out=self._handed_out, always=always)
        if self._mode is not Mode.DENY:
            for change in changes:
                self._say_once(logging.INFO, "deny would let only %s open %s", _names(change.uids), change.device.path)
            return
        self._remember(devices, changes)
        apply(changes)
        for change in changes:
            path, is_reset = change.device.path, self._given.get(change.device.path) == change.acl
            self._given[path] = change.acl
            if is_reset:
                logger.warning("%s was opened to others (mode %o), and is shut again", path, change.device.mode)
            else:
                logger.info("%s: only %s", path, _names(change.uids))

    def _remember(self, devices: Iterable[Device], changes: Iterable[Change]) -> None:
        """Write down how these devices were, before they are changed."""
        known = {device.uuid: device.path for device in devices}
        new = {change.device.path: change.device for change in changes if change.device.path not in self._state.before}
        if new or known.keys() - self._state.devices.keys():
            self._state.before |= new
            self._state.devices |= known
            self._state.save()

    def _uid_of(self, owner: str) -> int | None:
        """The user of this name. One that was known stays known: a directory of users may be away for a while."""
        if owner not in self._uids:
            unnamed = _UNNAMED_USER.fullmatch(owner)
            try:
                self._uids[owner] = int(unnamed[1]) if unnamed else pwd.getpwnam(owner).pw_uid
            except KeyError:
                text = "%s holds a GPU and is not a user of this machine, so nobody is let in for that lease"
                self._say_once(logging.WARNING, text, owner)
                return None
        return self._uids[owner]

    # --- those who use a GPU without a lease -------------------------------------------------------------------------------

    def _look_for_outsiders(self, gpus: Iterable[PoolGpu]) -> None:
        for gpu in gpus:
            for process in gpu.processes or ():
                if process.is_outside and not process.is_ignored and gpu.uuid in self._state.devices:
                    self._report(gpu, process)

    def _report(self, gpu: PoolGpu, process: PoolProcess) -> None:
        what = f"{process.name or 'a program'} (pid {process.pid}) uses GPU {gpu.gpu_id} without a lease"
        seen = read_process(PROC, process.pid)
        key = (gpu.uuid, process.pid, None if seen is None else seen.id.started)
        if key in self._told:
            return
        self._told.add(key)
        of_deny = "it has the device open from before, and keeps it until it ends"
        rest = of_deny if self._mode is Mode.DENY else "deny would have refused it"
        logger.warning("%s of %s; %s", what, process.user or "an unknown user", rest)
        if self._mode is not Mode.OBSERVE:
            how = f"start it by `gpu-pool run`, or lease the GPU now with `gpu-pool hold --pid {process.pid}`"
            tell_terminal(process.pid, f"\r\ngpu-pool: {what}; {how}\r\n")

    def _say_once(self, level: int, text: str, *values: object) -> None:
        key = text % tuple(map(str, values))
        if key not in self._told:
            self._told.add(key)
            logger.log(level, "%s", key)


def tell_terminal(pid: int, text: str) -> bool:
    """Write to the terminal of a process, if that is of the same user; whether it was done."""
    for number in (2, 1, 0):
        with suppress(OSError):
            path = (PROC / f"{pid}/fd/{number}").readlink()
            if not _TERMINAL.fullmatch(str(path)) or path.stat().st_uid not in read_uids(PROC, pid):
                continue
            terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(terminal, text.encode(errors="replace"))
            finally:
                os.close(terminal)
            return True
    return False


def uids_of(names: Iterable[str]) -> frozenset[int]:
    """The users of these names; Failure where one is not a user of this machine."""
    found = set()
    for name in names:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise Failure(f"--allow {name}: there is no user {name} on this machine", REFUSED) from None
    return frozenset(found)


def _names(uids: Iterable[int]) -> str:
    return ", ".join(["root", *(user_name(uid) for uid in sorted(uids) if uid)])
