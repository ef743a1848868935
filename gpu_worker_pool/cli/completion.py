"""Completion in bash, zsh and fish: the shell passes what was typed, and gets what could follow."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final

from gpu_worker_pool.failure import USAGE, Failure

from .app import ALIASES, COMMANDS, expand, function_of
from .declare import flags_of, parameters
from .output import out

_SCRIPTS: Final = {
    "bash": """_gpu_pool() {
    local IFS=$'\\n'
    COMPREPLY=($(gpu-pool --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _gpu_pool gpu-pool
""",
    "zsh": """#compdef gpu-pool
_gpu_pool() {
    local -a found
    found=(${(f)"$(gpu-pool --complete "${(@)words[2,CURRENT]}" 2>/dev/null | tr '\\t' ':')"})
    if (( ${#found} )); then _describe 'gpu-pool' found; else _files; fi
}
compdef _gpu_pool gpu-pool
""",
    "fish": """complete -c gpu-pool -f -a '(gpu-pool --complete (commandline -opc)[2..] (commandline -ct))'
""",
}
_FILES: Final = {
    "bash": "~/.local/share/bash-completion/completions/gpu-pool",
    "zsh": "~/.zfunc/_gpu-pool",
    "fish": "~/.config/fish/completions/gpu-pool.fish",
}
# A shell may evaluate what it is given, and some of these texts come from other users.
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._~@/, -]")


def run(what: str, rest: list[str]) -> int:
    """Answer a shell, or give it its script."""
    if what == "--complete":
        for word, about in candidates(rest):
            out().print(f"{word}\t{about}" if about else word)
        return 0
    shell = rest[0] if rest else Path(os.environ.get("SHELL") or "bash").name
    if shell not in _SCRIPTS:
        raise Failure(f"there is no completion for {shell or 'this shell'!r}; write {what} bash, zsh or fish", USAGE)
    if what == "--show-completion":
        out().write(_SCRIPTS[shell])
        return 0
    path = Path(_FILES[shell]).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SCRIPTS[shell], encoding="utf-8")
    more = "; add `fpath+=~/.zfunc; autoload -Uz compinit; compinit` to ~/.zshrc" if shell == "zsh" else ""
    out().print(f"completion for {shell} is in {path}{more}. Start a new shell to use it.")
    return 0


def candidates(words: list[str]) -> list[tuple[str, str]]:
    """What may stand in the place of the last word, each with what it is."""
    *before, incomplete = words or [""]
    before = expand(before)
    if not before:
        found = [(name, command.help) for name, command in COMMANDS.items()] + [(name, "") for name in ALIASES]
    elif before[0] not in COMMANDS:
        found = []
    else:
        found = _of_command(before, incomplete)
    return [(word, _UNSAFE.sub("", about)) for word, about in found if word.startswith(incomplete)]


def _of_command(before: list[str], incomplete: str) -> list[tuple[str, str]]:
    group, (name, *typed) = COMMANDS[before[0]].group, before
    part = typed[0] if group and typed and typed[0] in group else ""
    if group and part not in group:
        return [(each, "") for each in group]
    function = function_of(name, part)
    if incomplete.startswith("-"):
        return [(flag, "") for flag in flags_of(function)]
    declared = parameters(function)
    last = [
        each
        for each in declared
        if not each.is_argument and typed and typed[-1] in each.flags and each.type is not bool
    ]
    asked = last or [each for each in declared if each.is_argument]
    logging.disable()
    try:
        found = [pair for each in asked if each.declared.complete for pair in each.declared.complete(incomplete)]
    except Exception:  # noqa: BLE001 - nothing may be printed into a line that is being typed
        return []
    subcommands = [(each, "") for each in group or () if each and not typed]
    return [(word, about) for word, about in found if word not in typed and not _UNSAFE.search(word)] + subcommands
