"""The folder of a demo. It goes with the demo; where that was killed with -9, the next one clears it away."""

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
    """Where it is, and the descriptor of a locked file in it, which each worker inherits: it stays locked while one lives."""

    path: Path
    lock: int


@contextlib.contextmanager
def demo_folder() -> Iterator[DemoFolder]:
    """A new one, for the length of the block; what demos left behind that are dead is cleared away first."""
    clear_away_the_dead(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        path = Path(name)
        new = path / "new-lock"
        with new.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # It has its name only now: nobody finds it before it is locked.
            new.rename(path / _LOCK)
            yield DemoFolder(path, file.fileno())


def clear_away_the_dead(where: Path) -> None:
    """Remove the folders of our own demos of which no process is left. One that cannot be judged stays."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where somebody has it
                shutil.rmtree(folder, ignore_errors=True)
