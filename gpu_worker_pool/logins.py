"""The servers that a user is logged in at, with a token for each: `~/.config/gpu-pool/config.toml`, which only the user can
read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .urls import EndpointUrl, parse_endpoint

# Loaded where there are logins: most users have none, and every client looks for some.
if TYPE_CHECKING:
    from pathlib import Path

# The characters that an Authorization header may hold; the server takes no others.
TOKEN = re.compile(r"[!-~]{1,1024}")
# Far more than a user has logins.
_MOST_BYTES = 2**20
_HEADER = "# Kept by `gpu-pool login` and `gpu-pool logout`.\n"


class LoginsUnusable(Exception):  # noqa: N818 - what is the matter
    """The file cannot be used. The message says why and what to do, and shows no token."""


@dataclass(frozen=True, slots=True)
class Login:
    """A server, and the token there if it needs one."""

    endpoint: EndpointUrl
    token: str | None = field(default=None, repr=False)


def logins_file(environ: Mapping[str, str]) -> Path | None:
    """Where the logins of this user are; None if the user has no home."""
    from pathlib import Path  # noqa: PLC0415 - see above

    name = _file_name(environ)
    return None if name is None else Path(name)


def find_logins(environ: Mapping[str, str]) -> list[Login]:
    """All logins of this user. LoginsUnusable as `read_logins`."""
    name = _file_name(environ)
    return read_logins(logins_file(environ)) if name is not None and os.path.lexists(name) else []


def read_logins(path: Path | None) -> list[Login]:
    """All logins; none if there is no file. LoginsUnusable if it cannot be read, or others can read it."""
    try:
        if path is None or not (text := _private_text(path)):
            return []
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise LoginsUnusable(f"{path} cannot be read ({error}); repair it, or remove it and log in again") from None
    import tomllib  # noqa: PLC0415 - most programs have no logins

    try:
        entries = tomllib.loads(text).get("server", [])
        return [_login(entry) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError):
        # What is wrong is not quoted: it may be a part of a token.
        raise LoginsUnusable(
            f"{path} is not as `gpu-pool login` writes it: [[server]] with url and token, which is 1 to 1024 printable ASCII characters; repair it, or remove it and log in "
            "again"
        ) from None


def change_logins(path: Path, change: Callable[[list[Login]], list[Login]]) -> None:
    """Replace the logins by what `change` makes of them, while no other command changes them.

    LoginsUnusable as `read_logins`, OSError if the file cannot be written.
    """
    import fcntl  # noqa: PLC0415 - few programs change logins

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_logins(path, change(read_logins(path)))
    finally:
        os.close(lock)


def write_logins(path: Path, logins: Sequence[Login]) -> None:
    """Replace the file, at once and as a whole; of a link, the file that it leads to. OSError if it cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = _target(path)
    draft = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_HEADER + "".join(map(_entry, logins)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    if not path.is_symlink():
        return path
    target = path.resolve()
    facts = (target if target.exists() else target.parent).stat()
    if facts.st_uid != os.geteuid():
        raise PermissionError(f"it is a link to {target}, which belongs to another user; replace the link by a file")
    return target


def with_login(logins: Sequence[Login], added: Login) -> list[Login]:
    """These logins and another, which takes the place of one at the same server."""
    if any(known.endpoint.identity == added.endpoint.identity for known in logins):
        return [added if known.endpoint.identity == added.endpoint.identity else known for known in logins]
    return [*logins, added]


def without_login(logins: Sequence[Login], endpoint: EndpointUrl) -> list[Login]:
    """These logins but the one at this server."""
    return [known for known in logins if known.endpoint.identity != endpoint.identity]


def _private_text(path: Path) -> str:
    # A pipe that nobody writes to must not stop every command.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise LoginsUnusable(f"{path} is not a file, so it is not used; remove it and log in again")
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LoginsUnusable(f"{path} can be read or changed by others, so it is not used; `chmod 600 {path}`")
        if facts.st_uid not in {os.geteuid(), 0}:
            raise LoginsUnusable(f"{path} belongs to another user, so it is not used; remove it and log in again")
        if facts.st_size > _MOST_BYTES:
            raise LoginsUnusable(f"{path} is larger than {_MOST_BYTES} bytes, so it is not used; repair it")
        return file.read(_MOST_BYTES)


def _login(entry: Mapping[str, object]) -> Login:
    token = entry.get("token")
    if token is not None and (not isinstance(token, str) or not TOKEN.fullmatch(token)):
        raise TypeError("token")
    return Login(parse_endpoint(str(entry["url"])), token)


def _file_name(environ: Mapping[str, str]) -> str | None:
    home = environ.get("HOME", "")
    folders = (environ.get("XDG_CONFIG_HOME", ""), home and f"{home}/.config")
    # The XDG specification says to ignore a relative path.
    return next((f"{folder}/gpu-pool/config.toml" for folder in folders if folder.startswith("/")), None)


def _entry(login: Login) -> str:
    import json  # noqa: PLC0415 - see above

    # A JSON string of ASCII characters is a TOML string, too.
    token = "" if login.token is None else f"token = {json.dumps(login.token)}\n"
    return f"\n[[server]]\nurl = {json.dumps(login.endpoint.url)}\n{token}"
