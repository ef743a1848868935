"""The Unix users of this machine, and which of them administer a server."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from time import monotonic

# A directory service may be slow, and each new connection asks.
_KEEP_S = 10.0
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class User:
    """A Unix user. `is_admin`: root, the server's own user, or a member of its group of administrators."""

    name: str
    is_admin: bool = False


def user_name(uid: int | None = None) -> str:
    """The name of a user, by default of the one who runs this process; `uid-1234` where it has none."""
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return f"uid-{uid}"


class Users:
    """Looks users up by uid. `admin_group` is the group whose members are administrators; None for no group."""

    def __init__(self, admin_group: str | None = None) -> None:
        self._own_uid = os.geteuid()
        self._admin_group = admin_group
        self._known: dict[int, tuple[float, User]] = {}

    def why_no_admins(self) -> str | None:
        """Why the group gives no rights to any user; None where it is not set, or exists."""
        try:
            if self._admin_group:
                grp.getgrnam(self._admin_group)
        except (KeyError, OSError):
            return f"GPU_POOL_ADMIN_GROUP={self._admin_group!r} is not a group of this machine, so it has no members"
        return None

    def find(self, uid: int) -> User:
        now = monotonic()
        looked_up_at, user = self._known.get(uid, (-_KEEP_S, None))
        if user is None or now - looked_up_at >= _KEEP_S:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            user = User(user_name(uid), is_admin=uid in {0, self._own_uid} or is_in_group(uid, self._admin_group))
            self._known[uid] = now, user
        return user

    def administrators(self) -> str:
        """Those who are administrators, in words."""
        own = [] if self._own_uid == 0 else [f"{user_name(self._own_uid)} (the user of the server)"]
        group = [f"the members of the group {self._admin_group}"] if self._admin_group else []
        return ", ".join(["root", *own, *group])


def is_in_group(uid: int, group: str | None) -> bool:
    """Whether this user is a member of the group, by its name; not where the user or the group does not exist."""
    if not group:
        return False
    try:
        user, wanted = pwd.getpwuid(uid), grp.getgrnam(group)
        return wanted.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return False
