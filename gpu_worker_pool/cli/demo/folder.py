"""The folder of a demo. The demo removes it; if the demo was killed with -9, the next demo does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "gpu-pool-demo-"
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The folder, and the descriptor of a locked file in it. Each worker inherits it, and so keeps it locked."""

    path: Path
    lock: int


@contextlib.contextmanager
def demo_folder() -> Iterator[DemoFolder]:
    """Make a folder for the length of the block, and first remove the folders of dead demos."""
    remove_dead_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        path = Path(name)
        new = path / "new-lock"
        with new.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Renamed only now, so that the file is locked before another demo can find it.
            new.rename(path / _LOCK)
            yield DemoFolder(path, file.fileno())


def remove_dead_folders(where: Path) -> None:
    """Remove the folders of this user's demos without a living process. A folder that cannot be checked stays."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError if a process has the lock
                shutil.rmtree(folder, ignore_errors=True)
