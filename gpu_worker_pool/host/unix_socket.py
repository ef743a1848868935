"""The Unix socket of a server: where it is, and whether its directory lets no other user put one there."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from .state_dir import FOLDER, OTHERS_WRITE, why_replaceable

VARIABLE = "GPU_POOL_SOCKET"
_RUN = Path("/run")
_DIRECTORY_MODE = 0o755
# Every user of the machine may connect: the kernel tells the server who it is.
_SOCKET_MODE = 0o666


class SocketUnusable(Exception):  # noqa: N818 - the server goes on without it
    """The server cannot listen at this path. The message says why, and what to do."""


def server_socket(configured: str | None, environ: Mapping[str, str], *, port: int, uid: int) -> Path | None:
    """The path for a server's socket; None if it has none. An empty `configured` turns it off."""
    if configured is not None:
        return Path(configured) if configured else None
    # systemd separates several directories with colons.
    if by_systemd := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return Path(by_systemd) / f"{port}.sock"
    if uid == 0:
        return _RUN / FOLDER / f"{port}.sock"
    return _of_user(environ, port)


def client_sockets(environ: Mapping[str, str], *, port: int) -> list[Path]:
    """Where a client looks for the socket of the server at this port of its own machine, best first."""
    configured = environ.get(VARIABLE)
    if configured is not None:
        return [Path(configured)] if configured.strip() else []
    of_user = _of_user(environ, port)
    return [_RUN / FOLDER / f"{port}.sock", *([of_user] if of_user else [])]


def is_configured(environ: Mapping[str, str]) -> bool:
    """Whether the user named the socket. Its path says nothing of the port of its server."""
    return bool(environ.get(VARIABLE, "").strip())


def _of_user(environ: Mapping[str, str], port: int) -> Path | None:
    folder = environ.get("XDG_RUNTIME_DIR", "")
    return Path(folder) / FOLDER / f"{port}.sock" if folder.startswith("/") else None


def find_socket(environ: Mapping[str, str], *, port: int) -> Path | None:
    """The first of the client's candidates that is there and can be trusted."""
    return next((path for path in client_sockets(environ, port=port) if is_trustworthy(path, os.geteuid())), None)


def is_dead(path: Path) -> bool:
    """Whether the socket was left by a server that died."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(0)
        try:
            asker.connect(str(path))
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


def is_trustworthy(path: Path, uid: int) -> bool:
    """Whether only the owner of its directory, whom root or the user `uid` trusts, can have put the socket there."""
    folder = path.parent
    try:
        found = folder.lstat()
        if not stat.S_ISSOCK(path.lstat().st_mode) or _why_open(found) is not None:
            return False
        return why_replaceable(folder, {0, found.st_uid}, sticky={0, uid}) is None
    except OSError:
        return False


def _why_open(folder: os.stat_result) -> str | None:
    """Why another user than the directory's owner might put a socket there; None if none can."""
    if not stat.S_ISDIR(folder.st_mode):
        return "it is not a directory but a link or a file"
    if folder.st_mode & OTHERS_WRITE:
        return f"other users may write to it (mode {stat.S_IMODE(folder.st_mode):04o})"
    return None


class UnixListener:
    """A listening Unix socket, whose file `remove` removes. SocketUnusable if it cannot be had.

    The file of a server that died is replaced; that of a server that answers is not.
    """

    def __init__(self, path: Path, *, backlog: int) -> None:
        self.path = path.absolute()
        try:
            self._check_directory()
            if os.path.lexists(self.path) and not (self.path.is_socket() and is_dead(self.path)):
                raise SocketUnusable(
                    f"another server listens at {self.path}, or it is not a socket; set {VARIABLE} to another path"
                )
            self.socket = self._listen(backlog)
        except OSError as error:
            raise SocketUnusable(f"{path}: {error.strerror or error}; set {VARIABLE} to another path") from None

    def remove(self) -> None:
        """Remove the file, unless another server has put its own there."""
        try:
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        except OSError:
            pass  # it is gone, or its directory is

    def _check_directory(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=_DIRECTORY_MODE, parents=True)
        except FileExistsError:
            pass
        else:
            folder.chmod(_DIRECTORY_MODE)  # whatever the umask is: other users pass through it
        found = folder.lstat()
        why = _why_open(found)
        if why is None and found.st_uid != os.geteuid():
            why = f"it belongs to another user (uid {found.st_uid})"
        if why is not None:
            raise SocketUnusable(
                f"{folder} must be a directory to which only the user of the server may write, and {why}; set "
                f"{VARIABLE} to a path in another one"
            )

    def _listen(self, backlog: int) -> socket.socket:
        # Under another name first: at its final path, the socket takes connections from the first moment.
        draft = self.path.with_name(f"{self.path.name}~")
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(draft))
            draft.chmod(_SOCKET_MODE)
            listener.listen(backlog)
            self._inode = draft.lstat().st_ino
            draft.replace(self.path)
        except OSError:
            listener.close()
            raise
        return listener
