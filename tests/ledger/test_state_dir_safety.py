"""The leases are in a directory that no other user can change."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.sqlite.file import FILES
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.testing import ServerDidNotStartError, ServerProcess
from tests.other_user import ALICE, folder_of


def test_it_is_made_for_the_server_only(tmp_path: Path) -> None:
    with closing(SqliteJournal(tmp_path / "state" / "leases.sqlite3")):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    with pytest.raises(StateDirError, match="chmod go-w"):
        SqliteJournal(tmp_path / "state" / "leases.sqlite3")
    assert list((tmp_path / "state").iterdir()) == []


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder to another user")
    with pytest.raises(StateDirError, match=f"uid {ALICE}"):
        SqliteJournal(folder_of(ALICE, tmp_path / "state") / "leases.sqlite3")


def test_a_link_counts_as_its_target(tmp_path: Path) -> None:
    """As systemd makes it for a service with a DynamicUser."""
    (tmp_path / "private").mkdir(mode=0o755)
    (tmp_path / "state").symlink_to(tmp_path / "private")
    with closing(SqliteJournal(tmp_path / "state" / "leases.sqlite3")):
        pass
    (tmp_path / "private").chmod(0o777)
    with pytest.raises(StateDirError, match="may write"):
        SqliteJournal(tmp_path / "state" / "leases.sqlite3")


def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a link to another user")
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "own")
    os.chown(tmp_path / "state", ALICE, ALICE, follow_symlinks=False)
    with pytest.raises(StateDirError, match="link of another user"):
        SqliteJournal(tmp_path / "state" / "leases.sqlite3")


@pytest.mark.parametrize("end", FILES)
def test_no_file_of_a_journal_may_be_a_link(tmp_path: Path, end: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "state" / "leases.sqlite3"
    path.parent.mkdir(mode=0o700)
    Path(f"{path}{end}").symlink_to(victim)
    with pytest.raises(StateDirError, match="is a link"):
        SqliteJournal(path)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("end", FILES)
def test_no_file_of_a_journal_may_be_one_that_another_user_can_write(tmp_path: Path, end: str) -> None:
    path = tmp_path / "state" / "leases.sqlite3"
    SqliteJournal(path).close()
    file = Path(f"{path}{end}")
    file.touch(mode=0o600)
    file.chmod(0o620)
    with pytest.raises(StateDirError, match=f"may write to {file} .mode 0620.*chmod go-w {file}"):
        SqliteJournal(path)
    file.chmod(0o644)
    SqliteJournal(path).close()
    if os.geteuid() == 0:
        file.touch(mode=0o600)
        os.chown(file, ALICE, -1)
        with pytest.raises(StateDirError, match=f"{file} belongs to another user .uid {ALICE}"):
            SqliteJournal(path)


def test_a_server_does_not_start_there(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    server = ServerProcess(folder=tmp_path)
    with pytest.raises(ServerDidNotStartError, match="cannot start: other users may write to the state directory"):
        server.start()
    server.close()
