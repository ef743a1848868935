"""The directory in which a server keeps its leases: where it is, that no other user can change what is in it, and points at which
tests kill its process.
"""

from __future__ import annotations

import errno
import os
import pwd
import signal
import stat
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

FOLDER = "gpu-worker-pool"


class StateDirError(Exception):
    """There is no directory for the leases, or another user could change them. The message says why, and what to do."""


def state_dir(configured: str | None, environ: Mapping[str, str], *, platform: str, uid: int) -> Path:
    """The configured directory (GPU_POOL_STATE_DIR), else the one that systemd made, else the platform's default."""
    if configured:
        return _expanded(configured, environ, uid)
    # systemd separates several directories with colons.
    if by_systemd := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(by_systemd)
    if platform == "darwin":
        return _home(environ, uid) / "Library" / "Application Support" / FOLDER
    if platform.startswith("linux") and uid == 0:
        return Path("/var/lib") / FOLDER
    xdg = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if xdg.startswith("/"):
        return Path(xdg) / FOLDER
    return _home(environ, uid) / ".local" / "state" / FOLDER


def make_state_dir(folder: Path) -> None:
    """Make the directory if it is not there; StateDirError if another user could change the files in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_is_private(folder)


def check_is_private(folder: Path) -> None:
    """StateDirError if another user could change the files in this directory.

    A link counts as the directory that it leads to: systemd makes such links for services with a DynamicUser.
    """
    elsewhere = "set GPU_POOL_STATE_DIR to a folder of the server's own"
    _check(folder.stat(), f"the state directory {folder}", folder, f"or {elsewhere}, such as one inside it")
    if folder.is_symlink() and (owner := folder.lstat().st_uid) not in {0, os.geteuid()}:
        raise StateDirError(f"the state directory {folder} is a link of another user (uid {owner}); {elsewhere}")


def check_files(*files: Path) -> None:
    """StateDirError if another user could write to one of the journal's files, or if it is a link: that might lead to a
    file of another user.
    """
    for file in files:
        try:
            found = file.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            raise StateDirError(
                f"{file} is a link, and the files of the leases must not be; put the file itself there, or set "
                "GPU_POOL_STATE_DIR to the folder that has it"
            )
        _check(found, str(file), file, "after you have made sure that it was not changed")


def create_private(path: Path) -> None:
    """Create an empty file that only its owner may read; SQLite gives its logs the same rights."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def sync_folder(folder: Path) -> None:
    """Make the names of its files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(found: os.stat_result, name: str, path: Path, or_else: str) -> None:
    own = os.geteuid()
    if found.st_uid not in {0, own}:
        raise StateDirError(
            f"{name} belongs to another user (uid {found.st_uid}), who could change the leases; give it to the user of the "
            f"server (chown {own} {path}), {or_else}"
        )
    if found.st_mode & OTHERS_WRITE:
        raise StateDirError(
            f"other users may write to {name} (mode {stat.S_IMODE(found.st_mode):04o}), and could change the leases; "
            f"chmod go-w {path}, {or_else}"
        )


def _expanded(configured: str, environ: Mapping[str, str], uid: int) -> Path:
    """Expand ~: values in an env file have not passed through a shell."""
    if configured == "~" or configured.startswith("~/"):
        return _home(environ, uid) / configured[2:]
    return Path(configured)


def _home(environ: Mapping[str, str], uid: int) -> Path:
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        raise StateDirError(
            f"the user with uid {uid} has no home directory to keep the leases in; set GPU_POOL_STATE_DIR to a folder "
            "that outlives the server"
        ) from None


# --- who else could change a path ---------------------------------------------------------------------------------------

OTHERS_WRITE = 0o022
# As many as the kernel follows.
_MOST_LINKS = 40


def why_replaceable(path: Path, trusted: Collection[int], sticky: Collection[int] | None = None) -> str | None:
    """Why a user who is not `trusted` could change the file at this path, or put another one there, and what to do; None if none
    could. Each folder and each link on the way counts. In a folder as /tmp, in which every user may make a file, but none can
    replace another user's, those of the users `sticky` count; by default, of the trusted ones. OSError if the path cannot be
    followed.
    """
    at, names, links = Path("/"), [*reversed(path.absolute().parts[1:])], 0
    while names:
        name = names.pop()
        if name == "..":
            at = at.parent
            continue
        mode, below = at.lstat().st_mode, at / name
        found = below.lstat()
        is_kept = bool(mode & stat.S_ISVTX) and found.st_uid in (trusted if sticky is None else sticky)
        if mode & OTHERS_WRITE and not is_kept:
            return _open_to_others(at, mode)
        if found.st_uid not in trusted:
            return f"{below} belongs to another user (uid {found.st_uid}); give it to uid {os.geteuid()} or to root"
        if not stat.S_ISLNK(found.st_mode):
            at = below
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        to = below.readlink()
        at, parts = (Path("/"), to.parts[1:]) if to.is_absolute() else (at, to.parts)
        names += reversed(parts)
    mode = at.lstat().st_mode
    return _open_to_others(at, mode) if mode & OTHERS_WRITE else None


def _open_to_others(path: Path, mode: int) -> str:
    return f"other users may write to {path} (mode {stat.S_IMODE(mode):04o}); chmod go-w {path}"


# --- points at which a test kills the process ---------------------------------------------------------------------------

FAILPOINTS = (
    "before_append",  # nothing is written yet
    "in_append",  # all is written, nothing is committed
    "after_append",  # committed, no client has been told
    "in_compaction",  # the old events are replaced by the new ones, nothing is committed
    "after_compaction",  # committed, nothing is forgotten yet
    "in_creation",  # the tables are made, nothing is committed
    "after_creation",  # committed, a file is not yet in its place
    "in_backup",  # the copy is whole, and does not have its name yet
    "in_replacement",  # the old file is set aside, the new one is not yet in its place
)

# Of the process's own environment when it starts: a supervisor has that of a job later.
_failpoint = os.environ.get("GPU_POOL_FAILPOINT")
_passed: Counter[str] = Counter()


def reach(failpoint: str) -> None:
    """Pass one of the FAILPOINTS. With GPU_POOL_FAILPOINT=in_append:3 in its environment, the process sends itself SIGKILL when it
    passes `in_append` for the third time.
    """
    if _failpoint is None:
        return
    _passed[failpoint] += 1
    name, _, times = _failpoint.partition(":")
    if (name, int(times or "1")) == (failpoint, _passed[failpoint]):
        os.kill(os.getpid(), signal.SIGKILL)
