"""The server's settings, with the typed flags over the environment. Needs the packages of the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.server.settings import ServerSettings


def settings_of(typed: Mapping[str, Any], flags: Mapping[str, str], env_file: Path | None = None) -> ServerSettings:
    """The settings of the server. `typed` has the values of flags, by setting; `flags` has the flag of each setting. A named
    file takes the place of `.env`.

    Failure for an invalid flag, and for a file that cannot be read: there may be tokens in it. An invalid value in the
    environment is logged, and the default is used.
    """
    for name, value in typed.items():
        try:
            ServerSettings.read(name, value)
        except ValueError as why:
            raise Failure(f"{flags.get(name, name)} is {value!r}: {why}", USAGE) from None
    try:
        return ServerSettings(**typed, **({} if env_file is None else _named_file(env_file)))
    except (UnicodeDecodeError, OSError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror or str(error)
        which = ".env in this folder" if env_file is None else f"--env-file {env_file}"
        raise Failure(f"{which} cannot be read: {reason}; fix it, or move it away", USAGE) from None


def _named_file(path: Path) -> dict[str, Any]:
    path.open("rb").close()  # a file that is not there is not skipped, as .env is
    return {"_env_file": path.absolute()}
