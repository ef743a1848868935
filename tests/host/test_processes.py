from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.gpu import GpuProcess, ProcessId
from gpu_worker_pool.host.processes import MOST_ANCESTORS, ProcessTable
from tests.processes import child_process

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc on this system")


class FakeProc:
    """A folder that looks like /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int, *, parent: int = 0, started: int = 100, name: str = "python") -> None:
        tail = f"S {parent} {' '.join(['7'] * 17)} {started} {' '.join(['8'] * 30)}"
        self.add_raw(pid, f"{pid} ({name}) {tail}\n".encode())

    def add_raw(self, pid: int, stat: bytes) -> None:
        process = self.folder / str(pid)
        process.mkdir(exist_ok=True)
        (process / "stat").write_bytes(stat)

    def table(self) -> ProcessTable:
        return ProcessTable(self.folder)


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with child_process() as process:
        yield process


@needs_proc
def test_a_real_process_has_the_start_time_and_the_parent_that_the_kernel_gives_it(
    child: subprocess.Popen[bytes],
) -> None:
    table = ProcessTable()

    assert table.started(child.pid) == ticks(child.pid)
    assert table.ancestors(child.pid)[0] == ProcessId(os.getpid(), ticks(os.getpid()))
    assert table.ancestors(child.pid)[1:] == table.ancestors(os.getpid())
    assert table.name(child.pid) == Path(f"/proc/{child.pid}/comm").read_text().rstrip("\n")


def test_everything_about_a_process_on_a_gpu_is_put_together(proc: FakeProc) -> None:
    proc.add(1, started=1, name="init")
    proc.add(10, parent=1, started=50, name="bash")
    proc.add(11, parent=10, started=60)

    found = proc.table().gpu_process(11, 512.0)

    ancestors = (ProcessId(10, 50.0), ProcessId(1, 1.0))
    assert found == GpuProcess(ProcessId(11, 60.0), 512.0, "python", ancestors, getpass.getuser())


@pytest.mark.parametrize("name", ["python", "a b", "tmux: server", "(sd-pam)", ":-) 1 2 3", "a) S 4 (b", ""])
def test_a_name_may_hold_spaces_and_parentheses(proc: FakeProc, name: str) -> None:
    proc.add(9, started=5)
    proc.add(10, parent=9, started=50, name=name)

    assert proc.table().name(10) == name
    assert proc.table().started(10) == 50.0
    assert proc.table().ancestors(10) == (ProcessId(9, 5.0),)


@pytest.mark.parametrize("stat", [b"", b"10 (python", b"10 (python) S", b"10 (python) S 1 2 3", b"\0" * 100])
def test_what_cannot_be_understood_is_unknown(proc: FakeProc, stat: bytes) -> None:
    proc.add_raw(10, stat)

    assert proc.table().gpu_process(10, None) == GpuProcess(ProcessId(10), user=getpass.getuser())


def test_a_parent_that_is_younger_than_its_child_is_not_its_parent(proc: FakeProc) -> None:
    """The parent ended, and its pid went to another process, between the two reads."""
    proc.add(10, parent=9, started=100)
    proc.add(9, started=101)

    assert proc.table().ancestors(10) == ()


def test_a_very_long_line_of_ancestors_is_cut(proc: FakeProc) -> None:
    for pid in range(1, 200):
        proc.add(pid, parent=pid - 1)

    ancestors = proc.table().ancestors(199)

    assert [ancestor.pid for ancestor in ancestors] == list(range(198, 198 - MOST_ANCESTORS, -1))


def ticks(pid: int) -> float:
    """The start time by another way than the code's: from the end of the line, whose fields after it are fixed."""
    fields = Path(f"/proc/{pid}/stat").read_text().split()
    return float(fields[21 + len(fields) - 52])
