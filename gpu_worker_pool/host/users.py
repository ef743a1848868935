"""The Unix users of this machine, and which of them administer a server."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from time import monotonic

from gpu_worker_pool.core.model.configured import Role

# A directory service may be slow, and each new connection asks.
_KEEP_S = 10.0
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class User:
    """A Unix user. Root, the server's own user and the members of its group of administrators are administrators; the
    members of its group of operators are operators.
    """

    name: str
    role: Role = Role.USER


def user_name(uid: int | None = None) -> str:
    """The name of a user, by default of the one who runs this process; `uid-1234` where it has none."""
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return f"uid-{uid}"


class Users:
    """Looks users up by uid. The members of `admin_group` are administrators, those of `operator_group` operators; None
    for no group.
    """

    def __init__(self, admin_group: str | None = None, operator_group: str | None = None) -> None:
        self._own_uid = os.geteuid()
        self._admin_group = admin_group
        self._operator_group = operator_group
        self._known: dict[int, tuple[float, User]] = {}

    def why_no_members(self) -> list[str]:
        """Why a group gives no rights to any user; nothing of a group that is not set, or exists."""
        groups = {"GPU_POOL_ADMIN_GROUP": self._admin_group, "GPU_POOL_OPERATOR_GROUP": self._operator_group}
        return [
            f"{variable}={group!r} is not a group of this machine, so it has no members"
            for variable, group in groups.items()
            if group and not _exists(group)
        ]

    def find(self, uid: int) -> User:
        now = monotonic()
        looked_up_at, user = self._known.get(uid, (-_KEEP_S, None))
        if user is None or now - looked_up_at >= _KEEP_S:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            user = User(user_name(uid), self._role(uid))
            self._known[uid] = now, user
        return user

    def _role(self, uid: int) -> Role:
        if uid in {0, self._own_uid} or is_in_group(uid, self._admin_group):
            return Role.ADMINISTRATOR
        return Role.OPERATOR if is_in_group(uid, self._operator_group) else Role.USER

    def operators(self) -> str:
        """Those who are operators, in words."""
        group = f"the members of the group {self._operator_group}"
        return f"{self.administrators()}, {group}" if self._operator_group else self.administrators()

    def administrators(self) -> str:
        """Those who are administrators, in words."""
        own = [] if self._own_uid == 0 else [f"{user_name(self._own_uid)} (the user of the server)"]
        group = [f"the members of the group {self._admin_group}"] if self._admin_group else []
        return ", ".join(["root", *own, *group])


def _exists(group: str) -> bool:
    try:
        grp.getgrnam(group)
    except (KeyError, OSError):
        return False
    return True


def is_in_group(uid: int, group: str | None) -> bool:
    """Whether this user is a member of the group, by its name; not where the user or the group does not exist."""
    if not group:
        return False
    try:
        user, wanted = pwd.getpwuid(uid), grp.getgrnam(group)
        return wanted.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return False
