"""The operator's file of rules: who is told of what happens in the pool."""

from __future__ import annotations

import json
import logging
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen

from gpu_worker_pool.host.state_dir import why_replaceable
from gpu_worker_pool.notify.notice import Occasion
from gpu_worker_pool.notify.rules import DEFAULT_TIMEOUT_S, Program, Rule, Service, check_services

from .forms import STRICT, Number, Text
from .http.problems import Refusal
from .http.validation import read_form

logger = logging.getLogger(__name__)

MOST_RULES = 100
Pattern = Annotated[Text, MinLen(1)]


class RulesUnusable(Exception):  # noqa: N818 - what is the matter
    """The file cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookForm:
    """One [[hook]] of the file."""

    __pydantic_config__ = STRICT

    on: Annotated[tuple[Occasion, ...], MinLen(1), MaxLen(len(Occasion))]
    owner: Pattern | None = None
    node: Pattern | None = None
    url: Text | None = None
    command: Annotated[tuple[Text, ...], MinLen(1), MaxLen(1000)] | None = None
    timeout_s: Annotated[Number, Ge(0.1), Le(300.0)] = DEFAULT_TIMEOUT_S

    def rule(self, number: int) -> Rule:
        """A ValueError where the target cannot be used."""
        target: Program | Service
        if (self.url is None) == (self.command is None):
            raise ValueError("give it a url or a command, and not both")
        if self.command is not None:
            if not Path(self.command[0]).is_absolute():
                raise ValueError('command must begin with the path of a program: ["/usr/local/bin/tell"]')
            target = Program(self.command)
        else:
            target = Service(self.url or "")
        return Rule(frozenset(self.on), target, self.owner, self.node, self.timeout_s, number)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """All rules of a file; RulesUnusable if one of them cannot be used: half of the rules would look like all."""
    try:
        if (why := why_replaceable(path, os.geteuid())) is not None:
            raise RulesUnusable(f"other users could change {path}, and so run programs as this server: {why}")
        parsed, mode = tomllib.loads(path.read_text(encoding="utf-8")), path.stat().st_mode
    except OSError as error:
        raise RulesUnusable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RulesUnusable(f"{path} is not TOML: {error}") from None
    try:
        rules = tuple(_rule(entry, number) for number, entry in enumerate(_entries(parsed), start=1))
        check_services(rules)
    except ValueError as error:
        raise RulesUnusable(f"{path}: {error}") from None
    if mode & stat.S_IROTH and any(isinstance(rule.target, Service) for rule in rules):
        raise RulesUnusable(
            f"every user can read {path} (mode {stat.S_IMODE(mode):04o}), and a url is secret; chmod 600 {path}"
        )
    return rules


def load_rules(path: str | None) -> tuple[Rule, ...]:
    """The rules of the operator's file. One that cannot be used is logged as an error, and the server goes on without any."""
    if not path:
        return ()
    try:
        return read_rules(Path(path))
    except RulesUnusable as why:
        logger.error("no hook is told of anything: %s", why)  # noqa: TRY400
        return ()


def _entries(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    entries = parsed.pop("hook", [])
    if parsed:
        raise ValueError(f"{min(parsed)!r} is not known here; there is only [[hook]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("hook must be a list: begin each with [[hook]]")
    if len(entries) > MOST_RULES:
        raise ValueError(f"there are {len(entries)} hooks; there must be at most {MOST_RULES}")
    return entries


def _rule(entry: dict[str, Any], number: int) -> Rule:
    try:
        return read_form(HookForm, json.dumps(entry, default=str).encode()).rule(number)
    except (Refusal, ValueError) as error:
        raise ValueError(f"hook {number}: {error}") from None
