"""The server is killed at every boundary of its journal, with a client in the middle of a call, and started again.

What was acknowledged is there. What was not is there as a whole or not at all. Asking again with the same id gives one
lease, never a second GPU. Fences go on growing.
"""

from __future__ import annotations

import copy
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.events import Configured, DurableEvent
from gpu_worker_pool.host.state_dir import FAILPOINTS
from gpu_worker_pool.ledger.outbox import SHORTEST_TO_COMPACT
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.testing import ServerProcess
from tests.e2e.remembering_client import TIMEOUT_S, Client, Died

APPENDING = ("before_append", "in_append", "after_append")
COMPACTING = ("in_compaction", "after_compaction")
CREATING = ("in_creation", "after_creation")


def settings(folder: Path, failpoint: str | None = None) -> dict[str, str]:
    env = {
        "SIMULATED_GPUS": "1",
        "GPU_POOL_NODE": "box",
        "GPU_POOL_STATE_DIR": str(folder),
        # The first look and those after a release are all there are: what is written depends on the client alone.
        "REFRESH_INTERVAL": "60",
    }
    return {**env, "GPU_POOL_FAILPOINT": failpoint} if failpoint else env


def work_until_killed(client: Client, folder: Path, failpoint: str, checks: Callable[[], None]) -> None:
    """Start armed, check what the one before left, and work until the end comes."""
    with ServerProcess(settings(folder, failpoint)) as server:
        client.port = server.port
        with pytest.raises(Died):  # noqa: PT012 - anywhere in there
            checks()
            for _ in range(20):
                client.work()
        assert server.process is not None
        assert server.process.wait(TIMEOUT_S) == -signal.SIGKILL


def killed_at_start(folder: Path, failpoint: str) -> None:
    with closing(ServerProcess(settings(folder, failpoint))) as server:
        server.launch()
        assert server.process is not None
        assert server.process.wait(TIMEOUT_S) == -signal.SIGKILL, server.log()


@pytest.fixture(scope="module")
def all_is_over(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Client]:
    """The journal of a server on which somebody worked and all is given back, and who that was. To be copied."""
    folder, client = tmp_path_factory.mktemp("over"), Client()
    with ServerProcess(settings(folder)) as server:
        client.port = server.port
        client.work()
    return folder, client


def begin_with(past: tuple[Path, Client], folder: Path) -> Client:
    """Who goes on in this folder where that one ended."""
    shutil.copytree(past[0], folder, dirs_exist_ok=True)
    return copy.deepcopy(past[1])


def test_every_failpoint_is_tried_here() -> None:
    # No server restores: tests/cli/commands/test_backup.py.
    assert {*APPENDING, *COMPACTING, *CREATING, "in_backup", "in_replacement"} == set(FAILPOINTS)


@pytest.mark.parametrize("failpoint", APPENDING)
def test_killed_while_appending(failpoint: str, tmp_path: Path) -> None:
    client = Client()
    # The inventory is written once, at the first reading: which append that is, is up to the machine.
    with ServerProcess(settings(tmp_path)) as server:
        client.port = server.port
        client.work()
        server.stop()
    killed_at_start(tmp_path, failpoint)

    # By the third start on, what is left by the one before takes some of the appends. Which call meets the boundary is up to the
    # machine, so it is tried more often if need be.
    for number, times in enumerate((2, 3, 6, 7, 8, 4, 5, 9, 10)):
        if number >= 3 and {"PUT", "DELETE"} <= set(client.died_in):
            break

        def check_the_one_before(number: int = number) -> None:
            if number:
                client.verify()
                client.clear()

        work_until_killed(client, tmp_path, f"{failpoint}:{times}", check_the_one_before)

    with ServerProcess(settings(tmp_path)) as server:
        client.port = server.port
        client.verify()
        client.clear()
        client.work()
        client.verify()
    assert {"PUT", "DELETE"} <= set(client.died_in), client.died_in
    # The very first call met the boundary for sure; later ones may have met what was written besides.
    assert client.was_written[0] == (failpoint == "after_append")


@pytest.mark.parametrize("failpoint", COMPACTING)
def test_killed_while_compacting(failpoint: str, tmp_path: Path) -> None:
    """A compaction comes after a commit, so the call that caused it may have been answered or not."""
    fill_journal(tmp_path, SHORTEST_TO_COMPACT - 2)
    client = Client()

    work_until_killed(client, tmp_path, failpoint, lambda: None)

    with ServerProcess(settings(tmp_path)) as server:
        client.port = server.port
        client.verify()
        client.clear()
        client.work()
        client.verify()
    with closing(sqlite3.connect(tmp_path / "simulated-box.sqlite3")) as connection:
        (events,) = connection.execute("SELECT count(*) FROM event").fetchone()
    assert events < 100, "what was begun was not done again"


@pytest.mark.parametrize("failpoint", COMPACTING)
def test_killed_while_compacting_what_nobody_holds_any_more(
    failpoint: str, tmp_path: Path, all_is_over: tuple[Path, Client]
) -> None:
    """Nothing but the compacted history tells the last fence then."""
    client = begin_with(all_is_over, tmp_path)
    fill_journal(tmp_path, SHORTEST_TO_COMPACT + 1)

    killed_at_start(tmp_path, failpoint)

    with ServerProcess(settings(tmp_path)) as server:
        client.port = server.port
        client.work()
        client.verify()


def fill_journal(folder: Path, number: int) -> None:
    """With what leads nowhere."""
    with closing(SqliteJournal(folder / "simulated-box.sqlite3")) as journal:
        events: list[DurableEvent] = [
            Configured(0.0, "ignored_processes", ("x",), "ada" if even % 2 else None) for even in range(1, number + 1)
        ]
        journal.append(events, ())


@pytest.mark.parametrize("failpoint", CREATING)
def test_killed_while_the_first_journal_is_made(failpoint: str, tmp_path: Path) -> None:
    killed_at_start(tmp_path, failpoint)

    with ServerProcess(settings(tmp_path)) as server:
        client = Client()
        client.port = server.port
        client.work()
