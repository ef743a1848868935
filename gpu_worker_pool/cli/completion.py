"""Completion in bash, zsh and fish: the shell passes what was typed, and gets what could follow."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Final

from gpu_worker_pool.failure import USAGE, Failure

from .app import ALIASES, COMMANDS, expand, function_of
from .declare import Argument, flags_of, parameters
from .output import out

_SCRIPTS: Final = {
    "bash": """_gpu_pool() {
    local IFS=$'\\n'
    COMPREPLY=($(gpu-pool --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _gpu_pool gpu-pool
""",
    "zsh": """_gpu_pool() {
    local -a found
    found=(${(f)"$(gpu-pool --complete "${(@)words[2,CURRENT]}" 2>/dev/null | tr '\\t' ':')"})
    if (( ${#found} )); then _describe 'gpu-pool' found; else _files; fi
}
compdef _gpu_pool gpu-pool
""",
    "fish": """complete -c gpu-pool -f -a '(gpu-pool --complete (commandline -opc)[2..] (commandline -ct))'
""",
}
# A shell may evaluate what it is given, and some of these texts come from other users.
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._~@/, -]")


def completion(
    shell: Annotated[str | None, Argument(metavar="[bash|zsh|fish]", help="By default the one of $SHELL.")] = None,
) -> None:
    """Print the script that completes commands, options and ids in your shell.

    In bash, put `eval "$(gpu-pool completion bash)"` into ~/.bashrc; in zsh, the same with zsh after `compinit` in ~/.zshrc; in
    fish, `gpu-pool completion fish > ~/.config/fish/completions/gpu-pool.fish`.
    """
    name = shell or Path(os.environ.get("SHELL") or "bash").name
    if name not in _SCRIPTS:
        raise Failure(f"there is no completion for {name!r}; write bash, zsh or fish", USAGE)
    out().write(_SCRIPTS[name])


def complete(words: list[str]) -> None:
    """Answer a shell: what may stand in the place of the last word, a line each."""
    for word, about in candidates(words):
        out().print(f"{word}\t{about}" if about else word)


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
