"""What the user of one command asks to be told: by a program when it has its GPUs, by a URL of all that happens to it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from .notice import Occasion
from .rule import Program, Rule, Target, Webhook
from .targets import check_secret, check_url, mail_to

SECRET_VARIABLE: Final = "GPU_POOL_NOTIFY_SECRET"  # noqa: S105 - a name
MAIL_SCHEME: Final = "mailto:"
PROGRAM_S: Final = 60.0
_TOLD: Final = frozenset(Occasion) - {Occasion.NODE_UNKNOWN}


def job_rules(on_granted: str | None, notify: Sequence[str], environ: Mapping[str, str], cwd: str) -> tuple[Rule, ...]:
    """The rules of one command; a ValueError says which option cannot be used, and why."""
    rules = [] if on_granted is None else [_program(on_granted, environ, cwd)]
    return (*rules, *(Rule(_TOLD, _target(where, environ)) for where in dict.fromkeys(notify)))


def _program(line: str, environ: Mapping[str, str], cwd: str) -> Rule:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"--on-granted {line!r} cannot be split into words: {error}") from None
    if not words or "\0" in line:
        raise ValueError("--on-granted is empty; give it a program, with its arguments in the same quotes")
    # As the user's shell would find it, but no shell is asked: $ and ; mean nothing.
    found = shutil.which(words[0], path=environ.get("PATH"))
    if found is None:
        raise ValueError(f"--on-granted: there is no program {words[0]!r}; for a line of shell: sh -c '...'")
    program = Program((found, *words[1:]), cwd, tuple(environ.items()))
    return Rule(frozenset({Occasion.GRANTED}), program, timeout_s=PROGRAM_S)


def _target(where: str, environ: Mapping[str, str]) -> Target:
    try:
        if where.startswith(MAIL_SCHEME):
            return mail_to(where.removeprefix(MAIL_SCHEME))
        check_url(where)
        secret = environ.get(SECRET_VARIABLE)
        return Webhook(where, check_secret(secret, SECRET_VARIABLE) if secret else None)
    except ValueError as error:
        raise ValueError(f"--notify: {error}; or mailto:ADDRESS") from None
