"""`gpu-pool login` and `logout`: keep the servers that a user uses, and the tokens there."""

from __future__ import annotations

import getpass
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain, out, plain
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.logins import (
    Login,
    LoginsUnusable,
    change_logins,
    logins_file,
    read_logins,
    with_login,
    without_login,
)
from gpu_worker_pool.urls import EndpointUrl, parse_endpoint
from gpu_worker_pool.wire.page import MeView
from gpu_worker_pool.wire.reader import read

# Far more than a token has, and the lines around it.
_MOST_BYTES: Final = 65_536
_PASTED: Final = re.compile(r"(?:^|\s)GPU_POOL_TOKEN=(.*)$", re.MULTILINE)


def login(
    url: Annotated[str, Argument(metavar="URL", help="The URL of a GPU server, such as http://gpu-1:8000.")],
    *,
    token_file: Annotated[
        Path | None,
        Option("--token-file", metavar="FILE", help="Read the token from this file; `-`: from a pipe."),
    ] = None,
    no_token: Annotated[bool, Option("--no-token", help="Keep the URL alone: you only look there.")] = False,
) -> int:
    """Keep a server and your token there, for this command and the Python client.

    The token is typed, or read from a pipe; it is checked first. Both are kept in `~/.config/gpu-pool/config.toml`, which
    only you can read. The environment (GPU_SERVICE_ENDPOINT, GPU_POOL_TOKEN) goes before. Log in at several servers to use
    all of them.
    """
    endpoint = _endpoint(url)
    path = _path()
    _known(path)
    if not no_token and not endpoint.is_https and not is_this_machine(endpoint.host):
        complain("the token is sent over plain http, which others on the network can read; https keeps it secret")
    token = None if no_token else _token(endpoint, token_file)
    name = _checked(endpoint, token)
    _change(path, lambda known: with_login(known, Login(endpoint, token)))
    for variable in ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINT", "GPU_POOL_TOKEN"):
        if os.environ.get(variable, "").strip():
            complain(f"{variable} is set, and goes before what was kept now; unset it")
    out().print(f"logged in at {endpoint.url}{f' as {name}' if name else ''}; kept in {path}")
    return 0


def logout(
    url: Annotated[str | None, Argument(metavar="[URL]", help="The server; without it, all of them.")] = None,
) -> int:
    """Forget a server and your token there. The token itself stays valid: `gpu-pool token revoke` ends it."""
    path, endpoint = _path(), None if url is None else _endpoint(url)

    def leave(known: list[Login]) -> list[Login]:
        left = [] if endpoint is None else without_login(known, endpoint)
        if len(left) == len(known):
            where = "any server" if url is None else url
            raise Failure(f"you are not logged in at {where}; {path} has {len(known)} servers", REFUSED)
        return left

    leave(_known(path))  # nothing is made for a user without logins
    _change(path, leave)
    out().print(f"logged out at {'all servers' if url is None else url}")
    return 0


def _endpoint(url: str) -> EndpointUrl:
    try:
        return parse_endpoint(url.strip())
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def _path() -> Path:
    path = logins_file(os.environ)
    if path is None:
        raise Failure("there is no place to keep a login: set HOME, or XDG_CONFIG_HOME, to a folder of yours")
    return path


def _known(path: Path) -> list[Login]:
    try:
        return read_logins(path)
    except LoginsUnusable as why:
        raise Failure(str(why)) from None


def _token(endpoint: EndpointUrl, token_file: Path | None) -> str:
    if token_file is not None and str(token_file) != "-":
        try:
            text = _read(token_file)
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"the token cannot be read: {error}", USAGE) from None
    elif token_file is None and sys.stdin.isatty():
        text = getpass.getpass(f"Token for {endpoint.url}: ")
    else:
        text = sys.stdin.readline(_MOST_BYTES)
    token = _in_pasted(text)
    if not token:
        raise Failure(
            "there is no token; type it, pass it by a pipe or --token-file, or say --no-token. The administrator of the "
            "server makes one by `gpu-pool token add NAME`",
            USAGE,
        )
    return token


def _read(path: Path) -> str:
    """The beginning of a file, or of the pipe that a shell makes for `<(command)`; no other kind of file has an end."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise Failure(f"{path} is not a file; give --token-file a file that has the token", USAGE)
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise Failure(f"{path} has more than {_MOST_BYTES} bytes, so it is not a token", USAGE)
    return text.decode()


def _in_pasted(text: str) -> str:
    """The token, also out of the lines that `gpu-pool token add` prints."""
    found = _PASTED.search(text)
    if found is not None:
        return found[1].strip("\"' ")
    if "GPU_SERVICE_ENDPOINT" in text:
        raise Failure(
            "this is the line with the URL, not the token; give what follows GPU_POOL_TOKEN= in the other", USAGE
        )
    return text.strip()


def _checked(endpoint: EndpointUrl, token: str | None) -> str | None:
    """Whose the token is, by what the server says. Failure if the server cannot be reached, or does not know it."""
    servers = Servers([endpoint.url])
    try:
        servers.config = ClientConfig.build(service_endpoint=endpoint.url, token={endpoint.url: token} if token else {})
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    (answer,) = servers.run(lambda opened: opened.ask_all("/health" if token is None else "/ui/data/me"))
    if not answer.is_ok:
        raise Failure(f"{endpoint.url}: {plain(answer.why_not)}; nothing was kept", REFUSED if answer.status else 1)
    me = read(MeView, answer.data, clean=plain) if token is not None else None
    return None if me is None or me.name is None else f"{me.name} ({me.role})"


def _change(path: Path, change: Callable[[list[Login]], list[Login]]) -> None:
    try:
        change_logins(path, change)
    except LoginsUnusable as why:
        raise Failure(str(why)) from None
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error}") from None
