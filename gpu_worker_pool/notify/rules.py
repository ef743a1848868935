"""Which occasions are told where, and the rules that the options of one command are."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from . import apprise_process
from .notice import Notice, Occasion

DEFAULT_TIMEOUT_S: Final = 30.0
ON_GRANTED_S: Final = 60.0
# The program that talks to Apprise. -P: no file of the user's folder is taken for a module.
APPRISE: Final = (sys.executable, "-P", apprise_process.__file__)
_CHECK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class AppriseUrl:
    """A service that Apprise knows, by its URL, which is a secret as a whole."""

    url: str = field(repr=False)

    def __str__(self) -> str:
        scheme, mark, _ = self.url.partition("://")
        return f"{scheme}://…" if mark else "…"


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its arguments, which are passed on as they are: no shell reads them. `env` is its environment, as pairs;
    None: only what any program needs.
    """

    arguments: tuple[str, ...]
    cwd: str = "/"
    env: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.arguments[0]


Target = AppriseUrl | Program


@dataclass(frozen=True, slots=True)
class Rule:
    """`owner` and `node` are patterns, such as `gpu-*`; None: all. `number` is its place in the operator's file, from 1."""

    occasions: frozenset[Occasion]
    target: Target
    owner: str | None = None
    node: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    number: int | None = None

    def __str__(self) -> str:
        return str(self.target) if self.number is None else f"hook {self.number} ({self.target})"

    def applies_to(self, notice: Notice) -> bool:
        if notice.occasion not in self.occasions:
            return False
        if self.owner is not None and not fnmatchcase(notice.owner or "", self.owner):
            return False
        return self.node is None or any(fnmatchcase(node, self.node) for node in notice.nodes)


def check_services(rules: Sequence[Rule]) -> None:
    """A ValueError that names the first rule whose URL Apprise cannot use, and what to write."""
    urls = {str(rule): rule.target.url for rule in rules if isinstance(rule.target, AppriseUrl)}
    if not urls:
        return
    if find_spec("apprise") is None:
        raise ValueError(
            f"{min(urls)}: Apprise, which sends notices, is not installed; run pip install 'gpu-worker-pool[notify]'"
        )
    asked = "".join(json.dumps({"url": url}) + "\n" for url in urls.values())
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            APPRISE, input=asked, capture_output=True, text=True, timeout=_CHECK_S, cwd="/", check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"Apprise, which sends notices, cannot be run: {error}") from None
    for name, answer in zip(urls, done.stdout.splitlines(), strict=True):
        if (why := json.loads(answer)) is not None:
            raise ValueError(f"{name} cannot be used: {why}")


def rules_of_command(
    on_granted: str | None, notify: Sequence[str], environ: Mapping[str, str], cwd: str
) -> tuple[Rule, ...]:
    """The rules of --on-granted and --notify; a ValueError says which of them cannot be used, and why. Apprise is not asked
    here: `check_services` does.
    """
    rules = [] if on_granted is None else [_on_granted(on_granted, environ, cwd)]
    told = frozenset(Occasion) - {Occasion.NODE_UNKNOWN}
    return (*rules, *(Rule(told, _service(where, environ)) for where in dict.fromkeys(notify)))


def _on_granted(line: str, environ: Mapping[str, str], cwd: str) -> Rule:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"--on-granted {line!r} cannot be split into words: {error}") from None
    if not words or "\0" in line:
        raise ValueError("--on-granted is empty; give it a program, with its arguments in the same quotes")
    # As the user's shell would find it in `cwd`, where a supervisor is not; no shell is asked: $ and ; mean nothing.
    word = str(Path(cwd).absolute() / words[0]) if "/" in words[0] else words[0]
    found = shutil.which(word, path=environ.get("PATH"))
    if found is None:
        raise ValueError(f"--on-granted: there is no program {words[0]!r}; for a line of shell: sh -c '...'")
    program = Program((found, *words[1:]), cwd, tuple(environ.items()))
    return Rule(frozenset({Occasion.GRANTED}), program, timeout_s=ON_GRANTED_S)


def _service(where: str, environ: Mapping[str, str]) -> AppriseUrl:
    """By its URL, or by the variable that has it: other users see the words of a command."""
    url = where if "://" in where else environ.get(where, "")
    if "://" not in url:
        raise ValueError(
            f"--notify takes a URL, such as ntfy://TOPIC or mailto://USER:PASSWORD@SERVER?to=ADDRESS, or the name of an "
            f"environment variable that has one; {where!r} is neither"
        )
    return AppriseUrl(url)
