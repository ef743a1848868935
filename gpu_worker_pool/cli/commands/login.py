"""`gpu-pool login`: keep the servers that a user uses, and the tokens there."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain, out, plain
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.config import PLURAL_VARIABLES, SINGULAR_VARIABLE, ClientConfig
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
from gpu_worker_pool.wire.pool import MeView
from gpu_worker_pool.wire.reader import read

# Far more than a token has, and the lines around it.
_MOST_BYTES: Final = 65_536
_PASTED: Final = re.compile(r"(?:^|\s)GPU_POOL_TOKEN=(.*)$", re.MULTILINE)


def login(
    url: Annotated[
        str | None, Argument(metavar="[URL]", help="The URL of a GPU server, such as http://gpu-1:8000.")
    ] = None,
    *,
    no_token: Annotated[bool, Option("--no-token", help="Save the URL only, to look without requesting.")] = False,
    forget: Annotated[
        bool,
        Option("--forget", help="Forget this server and your token there, or all without a URL; logout does the same."),
    ] = False,
) -> None:
    """Save a server and your token for it, for this command and the Python client.

    Type the token, or pass it on standard input; it is checked first. Both are kept in `~/.config/gpu-pool/config.toml`, which
    only you can read. The environment (GPU_SERVICE_ENDPOINT, GPU_POOL_TOKEN) takes precedence. Log in at several servers to use
    all of them. A token that you forget here stays valid: `gpu-pool token revoke` ends it.
    """
    path = logins_file(os.environ)
    if path is None:
        raise Failure("there is no place to save a login; set HOME or XDG_CONFIG_HOME to a folder of yours")
    try:
        known = read_logins(path)
        endpoint = None if url is None else parse_endpoint(url.strip())
        if forget:
            _forget(path, known, endpoint)
        elif endpoint is None:
            raise Failure(
                "give the URL of a GPU server, such as http://gpu-1:8000 (see `gpu-pool login --help`)", USAGE
            )
        else:
            _log_in(path, endpoint, has_token=not no_token)
    except LoginsUnusable as why:
        raise Failure(str(why)) from None
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def _forget(path: Path, known: list[Login], endpoint: EndpointUrl | None) -> None:
    def leave(known: list[Login]) -> list[Login]:
        left = [] if endpoint is None else without_login(known, endpoint)
        if len(left) == len(known):
            where = "any server" if endpoint is None else endpoint.url
            raise Failure(f"you are not logged in at {where}; {path} has {len(known)} servers", REFUSED)
        return left

    leave(known)  # nothing is made for a user without logins
    _change(path, leave)
    out().print(f"logged out at {'all servers' if endpoint is None else endpoint.url}")


def _log_in(path: Path, endpoint: EndpointUrl, *, has_token: bool) -> None:
    if has_token and not endpoint.is_https and not is_this_machine(endpoint.host):
        complain("the token is sent over plain http, which others on the network can read; use https to keep it secret")
    token = _token(endpoint) if has_token else None
    name = _checked(endpoint, token)
    _change(path, lambda known: with_login(known, Login(endpoint, token)))
    for variable in (*PLURAL_VARIABLES, SINGULAR_VARIABLE, "GPU_POOL_TOKEN"):
        if os.environ.get(variable, "").strip():
            complain(f"{variable} is set and overrides this login; unset it to use the login")
    out().print(f"logged in at {endpoint.url}{f' as {name}' if name else ''}; kept in {path}")


def _token(endpoint: EndpointUrl) -> str:
    if sys.stdin.isatty():
        text = getpass.getpass(f"Token for {endpoint.url}: ")
    else:
        text = sys.stdin.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise Failure(f"standard input has more than {_MOST_BYTES} characters, so it is not a token", USAGE)
    token = _in_pasted(text)
    if not token:
        raise Failure(
            "there is no token; type it, or pass it on standard input (gpu-pool login URL < FILE), or say --no-token. An "
            "administrator of the server makes one with `gpu-pool token add NAME`",
            USAGE,
        )
    return token


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
    servers.config = ClientConfig.build(service_endpoint=endpoint.url, token={endpoint.url: token} if token else {})
    (answer,) = servers.run(lambda opened: opened.ask_all("/health" if token is None else "/ui/data/me"))
    if not answer.is_ok:
        raise Failure(f"{endpoint.url}: {plain(answer.why_not)}; nothing was kept", REFUSED if answer.status else 1)
    me = read(MeView, answer.data, clean=plain) if token is not None else None
    return None if me is None or me.name is None else f"{me.name} ({me.role})"


def _change(path: Path, change: Callable[[list[Login]], list[Login]]) -> None:
    try:
        change_logins(path, change)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error}") from None
