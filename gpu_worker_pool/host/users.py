"""The Unix users of this machine, and which of them administer a server."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic

from gpu_worker_pool.core.model.configured import Role

# A directory service (LDAP, say) may be slow or down. What it said is taken for as long as this, and is then asked again
# while the last word is served.
KEEP_S = 120.0
# A word that is older gives no rights of a group any more, unless the directory confirms it.
TRUST_S = 3600.0
# A caller that is not known yet waits for it this long.
LOOKUP_S = 5.0
_MOST_KEPT = 1024
# Of lookups at once: a directory that never answers must not cost a thread for each uid of a container.
_MOST_AT_ONCE = 64


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


class UserNotLookedUp(Exception):  # noqa: N818 - a fact, not a mistake
    """The directory of users has not said yet who a user is."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"the directory of users of this machine (NSS) has not said who uid {uid} is")


class Users:
    """Looks users up by uid, in threads of its own: a directory that does not answer holds no other caller. The members of
    `admin_group` are administrators, those of `operator_group` operators; None for no group. `look_up` asks the directory
    for the name and the role of a user, and may take long.
    """

    def __init__(
        self,
        admin_group: str | None = None,
        operator_group: str | None = None,
        *,
        look_up: Callable[[int], User] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._own_uid = os.geteuid()
        self._admin_group = admin_group
        self._operator_group = operator_group
        self._look_up = look_up or self._ask_directory
        self._clock = clock
        self._known: dict[int, tuple[float, User]] = {}
        # The lookups that are under way.
        self._asked: dict[int, asyncio.Future[None]] = {}

    def why_no_members(self) -> list[str]:
        """Why a group gives no rights to any user; nothing of a group that is not set, or exists."""
        groups = {"GPU_POOL_ADMIN_GROUP": self._admin_group, "GPU_POOL_OPERATOR_GROUP": self._operator_group}
        return [
            f"{variable}={group!r} is not a group of this machine, so it has no members"
            for variable, group in groups.items()
            if group and not _exists(group)
        ]

    def find(self, uid: int) -> User:
        """The user, by what the directory said last; UserNotLookedUp if it has said nothing yet. It asks nobody."""
        if uid not in self._known:
            raise UserNotLookedUp(uid)
        said_at, user = self._known[uid]
        is_old = self._clock() - said_at >= TRUST_S
        return User(user.name) if is_old and uid not in {0, self._own_uid} else user

    async def know(self, uid: int, timeout_s: float = LOOKUP_S) -> None:
        """Let the directory be asked, if it was not lately. Only a user without a word that can be trusted is waited for,
        and no longer than `timeout_s`; all callers of one user share one lookup.
        """
        known = self._known.get(uid)
        age_s = inf if known is None else self._clock() - known[0]
        if age_s < KEEP_S:
            return
        asked = self._asked.get(uid)
        if asked is None and len(self._asked) < _MOST_AT_ONCE:
            loop = asyncio.get_running_loop()
            asked = self._asked[uid] = loop.create_future()
            # A daemon: a directory that never answers does not keep the server from ending.
            threading.Thread(target=self._ask, args=(uid, loop), name="users", daemon=True).start()
        if asked is not None and age_s >= TRUST_S:
            await asyncio.wait({asked}, timeout=timeout_s)

    def _ask(self, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        user = None
        try:
            user = self._look_up(uid)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take_answer, uid, user)

    def _take_answer(self, uid: int, user: User | None) -> None:
        if user is not None:
            if len(self._known) >= _MOST_KEPT and uid not in self._known:
                del self._known[min(self._known, key=lambda known: self._known[known][0])]
            known = self._known.get(uid)
            # The same object while nothing has changed.
            self._known[uid] = self._clock(), known[1] if known is not None and known[1] == user else user
        asked = self._asked.pop(uid)
        if not asked.done():
            asked.set_result(None)

    def _ask_directory(self, uid: int) -> User:
        return User(user_name(uid), self._role(uid))

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


def members_of(named: Iterable[str]) -> tuple[list[str], list[str]]:
    """The users that these names stand for, of which `@name` is a Unix group; and the names that stand for nobody. It asks the
    directory, so it belongs in a thread.
    """
    members, unknown = dict[str, None](), []
    for name in named:
        try:
            if name.startswith("@"):
                group = grp.getgrnam(name[1:])
                own = [user.pw_name for user in pwd.getpwall() if user.pw_gid == group.gr_gid]
                members |= dict.fromkeys([*group.gr_mem, *own])
            else:
                members[name] = None
                pwd.getpwnam(name)
        except (KeyError, OSError):
            unknown.append(name)
    return list(members), unknown


def is_in_group(uid: int, group: str | None) -> bool:
    """Whether this user is a member of the group, by its name; not where the user or the group does not exist."""
    if not group:
        return False
    try:
        user, wanted = pwd.getpwuid(uid), grp.getgrnam(group)
        return wanted.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return False
