"""The operator's file of rules."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gpu_worker_pool.host.state_dir import why_replaceable

from .notice import Occasion
from .rule import DEFAULT_TIMEOUT_S, Program, Rule, Target, Webhook
from .targets import check_secret, check_url, mail_to

MOST_RULES = 100
_KEYS = frozenset({"on", "owner", "node", "url", "secret_file", "command", "mail", "timeout_s"})


class RulesUnusable(Exception):  # noqa: N818 - what is the matter
    """The file cannot be used. The message says why and what to do."""


def read_rules(path: Path) -> tuple[Rule, ...]:
    """All rules of a file; RulesUnusable if one of them cannot be used: half of the rules would look like all."""
    try:
        if (why := why_replaceable(path, os.geteuid())) is not None:
            raise RulesUnusable(f"other users could change {path}, and so run programs as this server: {why}")
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RulesUnusable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RulesUnusable(f"{path} is not TOML: {error}") from None
    try:
        return _rules(parsed)
    except ValueError as error:
        raise RulesUnusable(f"{path}: {error}") from None


def _rules(parsed: Mapping[str, Any]) -> tuple[Rule, ...]:
    if unknown := sorted(parsed.keys() - {"allow", "hook"}):
        raise ValueError(f"{unknown[0]!r} is not known here; there are `allow` and [[hook]]")
    allowed = _texts("allow", parsed.get("allow", []))
    entries = parsed.get("hook", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("hook must be a list: begin each with [[hook]]")
    if len(entries) > MOST_RULES:
        raise ValueError(f"there are {len(entries)} hooks; {MOST_RULES} are the limit")
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(_rule(entry, allowed, number))
        except ValueError as error:
            raise ValueError(f"hook {number}: {error}") from None
    return tuple(found)


def _rule(entry: Mapping[str, Any], allowed: tuple[str, ...], number: int) -> Rule:
    if unknown := sorted(entry.keys() - _KEYS):
        raise ValueError(f"{unknown[0]!r} is not known; a hook has {', '.join(sorted(_KEYS))}")
    occasions = set()
    for text in _texts("on", entry.get("on", [])):
        if text not in set(Occasion):
            raise ValueError(f"on has {text!r}; it must be among {', '.join(Occasion)}")
        occasions.add(Occasion(text))
    return Rule(
        frozenset(occasions),
        _target(entry, allowed),
        _optional_text("owner", entry),
        _optional_text("node", entry),
        entry.get("timeout_s", DEFAULT_TIMEOUT_S),
        number,
    )


def _target(entry: Mapping[str, Any], allowed: tuple[str, ...]) -> Target:
    given = [name for name in ("url", "command", "mail") if name in entry]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'no target'}; give one of url, command, mail")
    if "secret_file" in entry and given != ["url"]:
        raise ValueError("secret_file is for a url")
    if given == ["command"]:
        arguments = _texts("command", entry["command"])
        if not arguments or not Path(arguments[0]).is_absolute() or any("\0" in each for each in arguments):
            raise ValueError('command must be a list that begins with the path of a program: ["/usr/local/bin/tell"]')
        return Program(arguments)
    if given == ["mail"]:
        address = _optional_text("mail", entry) or ""
        return mail_to(address)
    url = _optional_text("url", entry) or ""
    check_allowed(url, allowed)
    return Webhook(url, _secret(entry))


def _secret(entry: Mapping[str, Any]) -> str | None:
    file = _optional_text("secret_file", entry)
    if file is None:
        return None
    try:
        why, mode = why_replaceable(Path(file), os.geteuid()), Path(file).stat().st_mode
        secret = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"secret_file {file} cannot be read: {error}") from None
    if why is not None:
        raise ValueError(f"other users could change secret_file {file}: {why}")
    if mode & stat.S_IRWXO:
        raise ValueError(
            f"every user can read secret_file {file} (mode {stat.S_IMODE(mode):04o}), and sign as this server; make another "
            f"secret, and chmod 600 {Path(file).resolve()}"
        )
    return check_secret(secret, f"secret_file {file}")


def check_allowed(url: str, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError unless the URL is http or https and begins with one that is allowed, up to a whole part of it."""
    check_url(url)
    if _can_climb(url):
        raise ValueError(
            "the path of the URL has a part `.` or `..`, or a backslash, which could lead out of what `allow` names; write "
            "the path that is meant"
        )
    if not any(_is_under(url, prefix) for prefix in allowed):
        parts = urlsplit(url)
        raise ValueError(
            f"no request goes to {parts.scheme}://{parts.netloc}, because `allow` does not name it; add the beginning of the "
            "URL there"
        )


def _can_climb(url: str) -> bool:
    """Whether a receiver may read another path than it says. Some decode it more than once, and some cut a part at `;`."""
    path, before = urlsplit(url).path, ""
    while path != before:
        path, before = unquote(path), path
    parts = (part.split(";", 1)[0] for part in path.split("/"))
    return "\\" in url or "\\" in path or any(part in {".", ".."} for part in parts)


def _is_under(url: str, prefix: str) -> bool:
    one, other = urlsplit(url), urlsplit(prefix)
    if (one.scheme, one.hostname, one.port) != (other.scheme, other.hostname, other.port):
        return False
    path, of = one.path or "/", other.path or "/"
    return path == of or path.startswith(of if of.endswith("/") else f"{of}/")


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name} must be a list of texts")
    return tuple(value)


def _optional_text(name: str, entry: Mapping[str, Any]) -> str | None:
    value = entry.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be a text, and not empty")
    return value
