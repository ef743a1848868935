"""Marks of the processes that hold GPUs."""

from __future__ import annotations

import getpass
import os
import secrets

import pytest

from gpu_worker_pool.host.gpu_lock import SCOPE_VARIABLE
from gpu_worker_pool.host.holder_mark import HolderMark, HolderMarks, MarkReader
from tests.processes import forked_child


@pytest.fixture(autouse=True)
def scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCOPE_VARIABLE, f"test-{secrets.token_hex(4)}")


def test_a_mark_is_seen_with_its_process_until_it_is_dropped() -> None:
    marks, reader = HolderMarks(), MarkReader()
    who = f"user {getpass.getuser()}, pid {os.getpid()}"

    marks.add("lease1", ["GPU-1", "GPU-2"])
    marks.add("lease1", ["GPU-1", "GPU-2"])
    marks.add("lease2", ["GPU-1"])
    assert sorted(reader.read()) == [
        HolderMark("GPU-1", "lease1", who),
        HolderMark("GPU-1", "lease2", who),
        HolderMark("GPU-2", "lease1", who),
    ]

    marks.drop("lease1")
    marks.drop("never-marked")
    assert reader.read() == (HolderMark("GPU-1", "lease2", who),)
    marks.close()
    assert reader.read() == ()


def test_a_lease_whose_id_is_too_long_for_a_name_is_not_marked() -> None:
    marks = HolderMarks()

    marks.add("x" * 200, ["GPU-1"])

    assert MarkReader().read() == ()


def test_a_fork_does_not_keep_a_mark() -> None:
    marks = HolderMarks()
    marks.add("lease1", ["GPU-1"])
    with forked_child():
        marks.drop("lease1")
        assert MarkReader().read() == ()
