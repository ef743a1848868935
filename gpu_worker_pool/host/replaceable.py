"""Whether another user could put another file at a path."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS_WRITE = 0o022
# As many as the kernel follows.
_MOST_LINKS = 40


def why_replaceable(path: Path, uid: int) -> str | None:
    """Why a user other than root and `uid` could change the file at this path, or put another one there, and what to do; None
    if none could. Each folder and each link on the way counts. OSError if the path cannot be followed.
    """
    trusted, links = {0, uid}, 0
    at, names = Path("/"), [*reversed(path.absolute().parts[1:])]
    while names:
        name = names.pop()
        if name == "..":
            at = at.parent
            continue
        folder, below = at.lstat(), at / name
        found = below.lstat()
        # As in /tmp: every user may make a file, but none can replace another user's.
        is_kept = bool(folder.st_mode & stat.S_ISVTX) and found.st_uid in trusted
        if folder.st_mode & _OTHERS_WRITE and not is_kept:
            return f"other users may write to {at} (mode {stat.S_IMODE(folder.st_mode):04o}); chmod go-w {at}"
        if found.st_uid not in trusted:
            return f"{below} belongs to another user (uid {found.st_uid}); give it to uid {uid} or to root"
        if not stat.S_ISLNK(found.st_mode):
            at = below
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        to = below.readlink()
        at, parts = (Path("/"), to.parts[1:]) if to.is_absolute() else (at, to.parts)
        names += reversed(parts)
    if (mode := at.lstat().st_mode) & _OTHERS_WRITE:
        return f"other users may write to {at} (mode {stat.S_IMODE(mode):04o}); chmod go-w {at}"
    return None
