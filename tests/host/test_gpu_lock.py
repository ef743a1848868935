"""One authority per GPU: the lock that servers of all users meet."""

from __future__ import annotations

import os
import pwd
import resource
import secrets
import socket
import subprocess
import sys

import pytest

from gpu_worker_pool.host.gpu_lock import GpuLocks, LockHolder, lock_holder
from tests.processes import forked_child

OTHER = """
import sys
from gpu_worker_pool.host.gpu_lock import GpuLocks
locks = GpuLocks(sys.argv[2], sys.argv[1], journal="/first/journal")
print(locks.take("GPU-1"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def scope() -> str:
    return f"test-{secrets.token_hex(4)}"


def other_process(scope: str, url: str = "http://localhost:8123") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, scope, url]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "None\n", "it has the lock"
    return other


def test_the_second_server_learns_who_has_the_gpu_and_does_not_take_it_over(scope: str) -> None:
    with other_process(scope) as other:
        locks = GpuLocks("http://localhost:1", scope)
        holder = locks.take("GPU-1")
        assert holder is not None
        me = pwd.getpwuid(os.getuid()).pw_name
        assert isinstance(holder, LockHolder)
        assert (holder.pid, holder.user, holder.url) == (other.pid, me, "http://localhost:8123")
        assert f"user {me}, pid {other.pid}); use it at http://localhost:8123" in str(holder)
        assert locks.take("GPU-2") is None

        other.kill()
        other.wait()

        assert locks.take("GPU-1") == holder, "that server may only be restarting"
        assert GpuLocks("http://localhost:1", scope).take("GPU-1") is None, "the kernel has freed it"
        assert GpuLocks(None, scope).take("GPU-2") is not None


def test_a_server_takes_over_from_its_predecessor_on_the_same_journal(scope: str) -> None:
    with other_process(scope) as other:
        locks = GpuLocks(None, scope, journal="/first/journal")
        assert locks.take("GPU-1") is not None

        other.kill()
        other.wait()

        assert locks.take("GPU-1") is None


def test_a_holder_that_says_nothing_has_the_gpu_all_the_same(scope: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0gpu-worker-pool/{scope}/gpu/GPU-1")

        assert "does not answer, so its user is not known" in str(GpuLocks(None, scope).take("GPU-1"))


def test_a_lock_that_the_system_refuses_is_not_taken_for_had(scope: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locks = GpuLocks(None, scope)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        refused = locks.take("GPU-1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert "its lock cannot be taken (Too many open files)" in str(refused)
    assert locks.take("GPU-1") is None, "it is tried again"


def test_a_fork_does_not_keep_the_lock(scope: str) -> None:
    locks = GpuLocks(None, scope)
    assert locks.take("GPU-1") is None
    with forked_child():
        locks.close()
        assert GpuLocks(None, scope).take("GPU-1") is None
        assert lock_holder("GPU-2", scope) is None
