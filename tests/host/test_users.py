"""Users are looked up in threads, once for all callers, and the last word is served while the directory is asked again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.host.users import KEEP_S, TRUST_S, User, UserNotLookedUp, Users

UID = 61_001


class Directory:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.was_asked = threading.Semaphore(0)
        self.may_answer = threading.Semaphore(0)
        self.role = Role.ADMINISTRATOR
        self.now = 0.0
        self.users = Users(look_up=self.look_up, clock=lambda: self.now)

    def look_up(self, uid: int) -> User:
        self.asked.append(uid)
        self.was_asked.release()
        self.may_answer.acquire()
        return User("ada", self.role)

    async def until_asked(self) -> None:
        await asyncio.to_thread(self.was_asked.acquire)


async def test_callers_of_one_user_share_a_lookup_and_the_loop_goes_on() -> None:
    directory = Directory()
    callers = [asyncio.create_task(directory.users.know(UID, timeout_s=60.0)) for _ in range(5)]
    await directory.until_asked()
    with pytest.raises(UserNotLookedUp, match=f"uid {UID}"):
        directory.users.find(UID)

    directory.may_answer.release()
    await asyncio.gather(*callers)

    assert directory.asked == [UID]
    assert directory.users.find(UID) == User("ada", Role.ADMINISTRATOR)
    await directory.users.know(UID)
    assert directory.asked == [UID], "it was asked lately"


async def test_the_last_word_is_served_while_the_directory_is_asked_again_and_rights_end_at_last() -> None:
    directory = Directory()
    directory.may_answer.release()
    await directory.users.know(UID, timeout_s=60.0)
    directory.now, directory.role = KEEP_S, Role.USER

    await directory.users.know(UID, timeout_s=60.0)
    await directory.users.know(UID, timeout_s=60.0)

    assert directory.users.find(UID).role is Role.ADMINISTRATOR
    directory.now = TRUST_S
    assert directory.users.find(UID) == User("ada"), "nobody confirms the rights of a group"
    caller = asyncio.create_task(directory.users.know(UID, timeout_s=60.0))
    directory.may_answer.release()
    await caller
    assert directory.asked == [UID, UID]
    assert directory.users.find(UID) == User("ada", Role.USER)


async def test_a_caller_does_not_wait_for_ever() -> None:
    directory = Directory()
    await directory.users.know(UID, timeout_s=0.0)

    with pytest.raises(UserNotLookedUp):
        directory.users.find(UID)
    directory.may_answer.release()
    await directory.users.know(UID, timeout_s=60.0)
    assert directory.asked == [UID]
