"""The record of a server's local holders, which servers of other users read after its death."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.holder_record import HolderRecord, RecordReader, prefix

US = ProcessId(os.getpid(), None)
NO_PROCESS = ProcessId(2**22 + 1, None)
GPUS = frozenset({"GPU-1", "GPU-2"})


def found(folder: Path) -> set[tuple[str, str]]:
    return {(mark.uuid, mark.lease_id) for mark in RecordReader(folder).read(GPUS)}


def test_it_names_the_gpus_of_processes_that_run(tmp_path: Path) -> None:
    record, reader = HolderRecord("pool", tmp_path), RecordReader(tmp_path)
    record.note({"a": (US, ["GPU-1", "GPU-2"]), "dead": (NO_PROCESS, ["GPU-2"]), "else": (US, ["GPU-3"])})

    marks = list(reader.read(GPUS))

    assert [(mark.uuid, mark.lease_id) for mark in marks] == [("GPU-1", "a"), ("GPU-2", "a")]
    assert f"pid {os.getpid()}, by the record {record.path}" in marks[0].who
    assert record.path.stat().st_mode & 0o777 == 0o644
    record.note({}, ["a"])
    assert list(reader.read(GPUS)) == []
    record.note({"b": (US, ["GPU-1"])})
    reader.own = record.path
    assert list(reader.read(GPUS)) == [], "its own leases are in its journal"


def test_it_stays_short_and_is_left_only_if_it_names_a_holder(tmp_path: Path) -> None:
    record = HolderRecord("pool", tmp_path)
    record.note({"kept": (US, ["GPU-1"])})
    for number in range(2000):
        record.note({f"{number}": (US, ["GPU-2"])})
        record.note({}, [f"{number}"])
    assert len(record.path.read_bytes().splitlines()) < 600
    assert found(tmp_path) == {("GPU-1", "kept")}
    record.close()
    assert found(tmp_path) == {("GPU-1", "kept")}, "the holder goes on without its server"

    again = HolderRecord("pool", tmp_path)
    again.begin({})
    assert list(tmp_path.iterdir()) == []


def test_what_another_user_puts_there_is_read_with_care(tmp_path: Path) -> None:
    record = HolderRecord("pool", tmp_path)
    record.note({"a": (US, ["GPU-1"])})
    head = record.path.read_bytes().splitlines()[0]
    other = tmp_path / "other"
    record.path.rename(other)
    link = tmp_path / f"{prefix()}link"
    link.symlink_to(other)
    os.mkfifo(tmp_path / f"{prefix()}pipe")
    for number, text in enumerate((b"", b"x\n", b"[]\n", head + b"\n[[]]\n{}\n", head + b'\n["a", "b", 1, "GPU-1"]\n')):
        (tmp_path / f"{prefix()}{number}").write_bytes(text)
    (tmp_path / f"{prefix()}boot").write_bytes(b'["another boot", null]\n["a", 1, null, "GPU-1"]\n')
    assert found(tmp_path) == set()
    (tmp_path / f"{prefix()}container").write_bytes(head.replace(b"pid:", b"-") + b'\n["c", 1, null, "GPU-1"]\n')
    assert found(tmp_path) == {("GPU-1", "c")}, "a process that cannot be seen may run"


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    record = HolderRecord("pool", tmp_path / "missing")
    record.note({"a": (US, ["GPU-1"])})
    record.close()
