"""What `gpu-pool doctor` finds out about this machine as a server. Needs the packages of the server."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.cli.serve.port_holder import PortHolder, find_server
from gpu_worker_pool.cli.units import count, show_memory
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.host.gpu_lock import LockHolder, lock_holder
from gpu_worker_pool.host.state_dir import StateDirError, check_is_private
from gpu_worker_pool.server.app import journal_path
from gpu_worker_pool.server.box.deaths import open_pidfd
from gpu_worker_pool.server.hook_rules import RulesUnusable, read_rules
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.serving import advice, bind
from gpu_worker_pool.server.settings import ServerSettings

from . import fleet
from .finding import LOST_FILE, Check, Finding, Status, complaints, judge_settings
from .gpus import GpuFacts

LITTLE_MB = 200.0
HARDLY_ANY_MB = 20.0

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|9p|afs|ceph|lustre|gpfs|beegfs|glusterfs|ncpfs|fuse\.(sshfs|glusterfs|ceph\S*|s3fs|rclone)"
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def checks(facts: GpuFacts, *, is_client_only: bool) -> list[Check]:
    settings, heard = load_settings()
    return [
        Check("server-settings", lambda: judge_settings("server", heard)),
        Check("simulated", lambda: judge_simulated(settings.simulated_gpus, has_gpus=bool(facts.readings))),
        Check("port", lambda: judge_port(Port.of(settings), is_client_only=is_client_only)),
        Check("authority", lambda: judge_authority(find_holders(facts.readings))),
        Check("state-dir", lambda: check_state_dir(settings)),
        Check("tokens", lambda: check_tokens(settings, heard)),
        Check("hooks", lambda: check_hooks(settings)),
        Check("pidfd", check_pidfd),
        *fleet.checks(settings),
    ]


def load_settings() -> tuple[ServerSettings, list[str]]:
    """The settings that a server started here would have, and what it would complain of."""
    with complaints() as heard:
        settings = ServerSettings.load()
    return settings, heard


@dataclass(frozen=True, slots=True)
class Port:
    """Whether the server's address can be bound; `holder` is a GPU server that has it already."""

    host: str
    port: int
    error: OSError | None = None
    holder: PortHolder | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> Port:
        """Try to bind it, for a moment and without listening."""
        try:
            bind(settings).close()
        except OSError as error:
            holder = find_server(settings.host, settings.port, settings.api_prefix)
            return cls(settings.host, settings.port, error, holder)
        return cls(settings.host, settings.port)


@dataclass(frozen=True, slots=True)
class StateDir:
    """Where the leases are kept. `nearest` is the folder, or the one to create it in; `holder_pid` locks the journal."""

    journal: Path
    nearest: Path
    is_writable: bool
    free_mb: float
    file_system: str | None
    holder_pid: int | None

    @classmethod
    def of(cls, journal: Path) -> StateDir:
        """Look without locking: a lock taken here would keep a server that starts just now from starting."""
        folder = journal.absolute().parent
        # Path.exists would raise for a folder that this user may not enter.
        nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
        return cls(
            journal.absolute(),
            nearest,
            is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
            free_mb=shutil.disk_usage(nearest).free / 2**20,
            file_system=file_system_of(nearest.resolve(), _read(Path("/proc/self/mountinfo"))),
            holder_pid=holder_of(Path(f"{journal}.lock"), _read(Path("/proc/locks"))),
        )

    @property
    def exists(self) -> bool:
        return self.nearest == self.journal.parent


def file_system_of(path: Path, mounts: str) -> str | None:
    """The type of the file system that a path is on, by the text of /proc/self/mountinfo; None where that is not known."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        place, _, rest = line.partition(" - ")
        if len(fields := place.split()) < 5 or not rest:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # The last file system that was mounted at a path hides those before it.
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), rest.split()[0]
    return None if best is None else best[1]


def holder_of(lock: Path, locks: str) -> int | None:
    """The process that has locked this file, by the text of /proc/locks; None where the file is not locked."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return None
    found = re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) +[0-9a-f]+:[0-9a-f]+:{inode} ", locks)
    return int(found[1]) if found else None


def can_everybody_read(path: Path) -> bool:
    """Whether every user of the machine can read it, which includes passing through all folders above it."""
    try:
        folders = [folder.stat().st_mode & 0o001 for folder in path.resolve().parents]
        return bool(path.stat().st_mode & 0o004) and all(folders)
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def judge_simulated(simulated_gpus: str | None, *, has_gpus: bool) -> Finding | None:
    if not simulated_gpus:
        return None
    text = f"SIMULATED_GPUS={simulated_gpus}: a server that is started here hands out GPUs that are not there"
    if has_gpus:
        return Finding("simulated", "warning", f"{text}, and not those that are", "unset SIMULATED_GPUS")
    return Finding("simulated", "ok", text)


def judge_port(port: Port, *, is_client_only: bool) -> Finding:
    """Whether a server can be started here. A machine whose endpoints are all elsewhere need not have one."""
    name, where = "port", f"{port.host}:{port.port}"
    if port.holder is not None:
        holder, source = port.holder, ", simulated" if port.holder.source == "simulated" else ""
        shown = f"{holder.node}, {count(holder.gpu_count, 'GPU')}{source}"
        return Finding(name, "ok", f"a GPU server runs at {holder.url} ({shown})")
    if port.error is not None:
        words = advice(port.error)
        if isinstance(port.error, socket.gaierror):
            words = f"HOST={port.host}: {words}"
        text = f"a server cannot listen on {where}: {words.partition(';')[0]}, and no GPU server of ours is there"
        return Finding(name, "warning" if is_client_only else "problem", text, words.partition("; ")[2] or None)
    return Finding(name, "ok", f"{where} is free: a server can be started there")


def find_holders(readings: Sequence[Reading]) -> dict[LockHolder, list[int]]:
    """The servers that have GPUs of this machine, with the indices of those."""
    found: dict[LockHolder, list[int]] = {}
    for reading in readings:
        if holder := lock_holder(reading.gpu.key.uuid):
            found.setdefault(holder, []).append(reading.gpu.index)
    return found


def judge_authority(holders: Mapping[LockHolder, Sequence[int]]) -> list[Finding]:
    """Whose servers grant the GPUs of this machine. A second server would grant none of these."""
    found = []
    for holder, indices in holders.items():
        which = ", ".join(map(str, indices))
        text = f"the server of {holder.user} (pid {holder.pid}) grants these GPUs of this machine: {which}"
        how = f"use that one: --endpoint {holder.url}" if holder.url else None
        found.append(Finding("authority", "ok", text, how))
    return found


def judge_state_dir(state: StateDir) -> list[Finding]:
    name, folder = "state-dir", state.journal.parent
    elsewhere = "set GPU_POOL_STATE_DIR to a folder of the server's own on a local disk"
    if not state.is_writable:
        text = f"{folder} cannot be {'written to' if state.exists else 'made'} by this user: see the rights on {state.nearest}"
        return [Finding(name, "problem", text, elsewhere)]
    found = []
    if state.free_mb < LITTLE_MB:
        status: Status = "problem" if state.free_mb < HARDLY_ANY_MB else "warning"
        text = f"only {show_memory(state.free_mb)} are free for {folder}; on a full disk nothing is granted"
        found.append(Finding(name, status, text, "free some space, or set GPU_POOL_STATE_DIR to another disk"))
    if state.file_system in _IN_MEMORY:
        text = f"{folder} is in memory ({state.file_system}): all leases are forgotten when the machine restarts"
        found.append(Finding(name, "warning", text, elsewhere))
    elif state.file_system is not None and _NETWORK.fullmatch(state.file_system):
        text = f"{folder} is on a network file system ({state.file_system}), whose locks and writes cannot be relied on"
        found.append(Finding(name, "warning", text, elsewhere))
    if found:
        return found
    facts = ["there" if state.exists else "can be made", f"{show_memory(state.free_mb)} free"]
    if state.file_system:
        facts.append(state.file_system)
    if state.holder_pid is not None:
        facts.append(f"in use by the server with pid {state.holder_pid}")
    return [Finding(name, "ok", f"{state.journal} ({', '.join(facts)})")]


def judge_tokens(tokens: Tokens, heard: list[str], open_file: str | None) -> list[Finding]:
    """Whether the tokens can be used and are secret. `open_file` is a file of tokens that every user can read."""
    name = "tokens"
    if tokens.is_broken or tokens.too_short:
        return [Finding(name, "problem", "; ".join(heard), "correct GPU_POOL_TOKENS or the file: lines of name:token")]
    if tokens.is_unset:
        text = "GPU_POOL_TOKENS is not set; tokens that were added while a server ran are not in the settings"
        how = "`gpu-pool token list` shows those of a server that runs, and `gpu-pool token add NAME` makes one"
        return [Finding(name, "ok", text, how)]
    if open_file is not None:
        text = f"every user of this machine can read the tokens in {open_file}, and use them"
        return [Finding(name, "problem", text, f"chmod 600 {open_file}, and give out new tokens")]
    return [Finding(name, "ok", f"these have one: {', '.join(sorted(tokens.names))}")]


def check_state_dir(settings: ServerSettings) -> list[Finding]:
    try:
        state = StateDir.of(journal_path(settings))
        if state.exists and state.holder_pid is None:  # the server that has it may be another user's
            check_is_private(state.journal.parent)
        return judge_state_dir(state)
    except StateDirError as error:
        return [Finding("state-dir", "problem", *str(error).split("; ", 1))]


def check_tokens(settings: ServerSettings, heard_before: list[str]) -> list[Finding]:
    """The tokens. `heard_before` is what the settings complained of."""
    with complaints() as heard:
        tokens = settings.load_tokens()
    file = settings.gpu_pool_tokens_file
    is_told_elsewhere = bool(settings.gpu_pool_tokens) or file is not None
    if not is_told_elsewhere and any(words.startswith(LOST_FILE) for words in heard_before):
        text = "whether there are tokens is not known, because .env cannot be read: see server-settings"
        return [Finding("tokens", "skipped", text)]
    return judge_tokens(tokens, heard, file if file and can_everybody_read(Path(file)) else None)


def check_hooks(settings: ServerSettings) -> list[Finding]:
    file = settings.gpu_pool_hooks_file
    if not file:
        return []
    try:
        rules = read_rules(Path(file))
    except RulesUnusable as why:
        return [Finding("hooks", "problem", str(why), "correct GPU_POOL_HOOKS_FILE; until then no hook is told")]
    return [Finding("hooks", "ok", f"{count(len(rules), 'hook')} in {file}")]


def check_pidfd() -> Finding:
    try:
        os.close(open_pidfd(os.getpid()))
    except OSError as error:
        text = f"the kernel does not tell of deaths (pidfd: {error.strerror}); they are noticed a quarter of a second later"
        return Finding("pidfd", "warning", text, "Linux 5.3 or newer can; in a container allow the call pidfd_open")
    return Finding("pidfd", "ok", "the kernel tells at once when a worker dies")
