"""`gpu-pool`: its commands, and the exit codes for what they raise."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import gpu_worker_pool
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.failure import FAILED, SIGNAL_BASE, USAGE, Failure

from .declare import HelpWanted, help_of, read
from .output import OutputClosed, complain, is_output_broken, out, stop_printing, wrap


class CommandPlace(NamedTuple):
    """Where a command is, and what it does in a line. A group has several commands by name; `""` is the group alone."""

    module: str
    help: str
    group: dict[str, str] | None = None


# In the order of the help. Each is loaded only if it is typed.
EVERYDAY: Final = {
    "run": CommandPlace(".run.command", "Wait for GPUs, run a command on them, release them."),
    "submit": CommandPlace(".jobs.submit", "The same in the background: prints an id and returns."),
    "batch": CommandPlace(".batch.command", "Run many commands, each on its own GPUs."),
    "jobs": CommandPlace(
        ".jobs.change",
        "List what you run and what waits, however it was started; hold, release, change it.",
        {"": "jobs", "hold": "hold", "release": "release", "first": "first", "edit": "edit"},
    ),
    "logs": CommandPlace(".jobs.logs", "Print what a job wrote; -f follows it."),
    "cancel": CommandPlace(".jobs.cancel", "Stop anything of yours: a job, a run, a waiting request."),
    "status": CommandPlace(".commands.status", "Show every GPU, who holds it, and who waits; --watch follows it."),
    "explain": CommandPlace(".commands.explain", "Explain why your requests wait, or show one lease."),
    "history": CommandPlace(".jobs.history", "Show what has ended, and how."),
    "doctor": CommandPlace(".doctor.command", "Check this machine and the servers, and say what to do."),
}
MORE: Final = {
    "shell": CommandPlace(".commands.hold", "Start your shell on GPUs; they are released when you leave it."),
    "hold": CommandPlace(".commands.hold", "Hold GPUs without a command, and print what to export."),
    "env": CommandPlace(".commands.hold", "Print what to export in another terminal to use GPUs that you hold."),
    "retry": CommandPlace(".jobs.job_control", "Run finished jobs again."),
    "on": CommandPlace(".run.command", "Run a command of gpu-pool on another box of the fleet, by your ssh."),
    "exec": CommandPlace(".run.command", "Run a second command inside a running job or lease of yours."),
    "report": CommandPlace(".commands.report", "Add up GPU-hours by owner."),
    "login": CommandPlace(".commands.login", "Save a server and your token for it, or forget them."),
    "completion": CommandPlace(".completion", "Print the completion script of your shell."),
    "demo": CommandPlace(".demo.command", "See a pool at work: a worker and the server are killed."),
}
OPERATE: Final = {
    "serve": CommandPlace(".serve.command", "Start the server on this machine."),
    "service": CommandPlace(
        ".commands.service",
        "Install the server as a systemd service.",
        {"install": "install", "status": "status", "remove": "remove"},
    ),
    "drain": CommandPlace(".commands.drain", "Take GPUs out of service, and put them back."),
    "reserve": CommandPlace(".commands.reserve", "Book GPUs for an owner and a time; alone, list what is booked."),
    "quota": CommandPlace(
        ".commands.quota",
        "Show and set how much each owner may use.",
        {"list": "list_quotas", "set": "set_quota", "remove": "remove_quota"},
    ),
    "group": CommandPlace(
        ".commands.group",
        "Let owners share a quota, or go first on some GPUs.",
        {"list": "list_groups", "add": "add_group", "remove": "remove_group"},
    ),
    "token": CommandPlace(
        ".commands.token",
        "Show and set who may use the server from other machines.",
        {"list": "list_tokens", "add": "add_token", "revoke": "revoke_token"},
    ),
    "fleet": CommandPlace(
        ".commands.fleet",
        "List, add and remove the boxes of a fleet; move it to a database.",
        {"": "show_fleet", "key": "show_key", "forget": "forget_node", "move": "move_fleet"},
    ),
    "enforce": CommandPlace(".commands.enforce", "Let only the holders of a GPU open its device."),
    "backup": CommandPlace(".commands.backup", "Copy the pool of this box into one file."),
    "restore": CommandPlace(".commands.backup", "Replace the journal with a backup."),
    "keeper": CommandPlace(".jobs.submit", "Run submitted jobs; submit starts it for you."),
}
COMMANDS: Final = EVERYDAY | MORE | OPERATE
# Other words for some of these.
ALIASES: Final = {
    "top": ("status", "--watch"),
    "release": ("cancel",),
    "join": ("exec",),
    "undrain": ("drain", "--undo"),
    "logout": ("login", "--forget"),
}
_USAGE: Final = "Usage: gpu-pool COMMAND [OPTIONS]\n\nLease GPUs to jobs, so that no two of them collide.\n"
_FOOT: Final = """\
Options of most commands:
  -e, --endpoint URL  The server: gpu-2:8000, a URL, or several with commas
                      between. By default your login, else this machine's.
  --json              Print JSON, as docs/how-to/scripts.md shows it.

`gpu-pool COMMAND --help` explains a command, `gpu-pool help operate` lists
those for operators."""
_NAME: Final = "gpu-pool"


def function_of(name: str, part: str = "") -> Callable[..., Any]:
    """The function of a command, or of one of a group."""
    module, _, group = COMMANDS[name]
    found: Callable[..., Any] = getattr(import_module(module, __package__), group[part] if group else name)
    return found


def paths() -> list[tuple[str, str]]:
    """All that can be typed: (`status`, ``), (`quota`, `set`)."""
    return [(name, part) for name, command in COMMANDS.items() for part in command.group or ("",)]


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. A failure is one line on standard error."""
    try:
        result = _run(list(arguments))
        sys.stdout.flush()
    except Failure as failure:
        complain(str(failure))
        return _failure_code(arguments, failure.code)
    except PoolError as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return SIGNAL_BASE + signal.SIGINT
    except OutputClosed as closed:
        return _closed(closed.cause)
    except OSError as error:
        if is_output_broken():
            return _closed(error)
        complain(f"cannot continue: {error}")
        return FAILED
    return result


def _closed(cause: OSError) -> int:
    """The exit code where standard output cannot be written."""
    stop_printing()
    if isinstance(cause, BrokenPipeError):
        return SIGNAL_BASE + signal.SIGPIPE
    if cause.errno == errno.EIO:
        return SIGNAL_BASE + signal.SIGHUP  # the terminal is gone
    complain(f"cannot continue: {cause}")
    return FAILED


def expand(typed: list[str]) -> list[str]:
    """What was typed, with another word for a command replaced by that command."""
    return [*ALIASES.get(typed[0], typed[:1]), *typed[1:]] if typed else typed


def _run(typed: list[str]) -> int:
    match expand(typed):
        case []:
            out().write(_overview(EVERYDAY))
            return USAGE
        case ["-h" | "--help" | "help"]:
            out().write(_overview(EVERYDAY, MORE))
            return 0
        case ["help", "operate"]:
            out().write(_overview(OPERATE))
            return 0
        case ["help", name, *rest] if name in COMMANDS or name in ALIASES:
            return _whole_help(expand([name])[0], rest)
        case ["--version"]:
            out().print(f"{_NAME} {gpu_worker_pool.__version__}")
            return 0
        case ["--complete", *words]:
            from .completion import complete  # noqa: PLC0415 - for shells only

            complete(words)
            return 0
        case [name, *rest] if name in COMMANDS:
            return _command(name, rest)
    raise Failure(_unknown(typed[0]), USAGE)


def _whole_help(name: str, rest: list[str]) -> int:
    """Tell all about a command, or about a group of them."""
    group, part = COMMANDS[name].group, rest[0] if rest else ""
    if group is not None and part not in group:
        return _command(name, ["--help"])
    out().write(help_of(" ".join(filter(None, (_NAME, name, part))), function_of(name, part), is_whole=True))
    return 0


def _command(name: str, rest: list[str]) -> int:
    group, part = COMMANDS[name].group, ""
    if group is not None:
        if rest[:1] and rest[0] in group:
            part, *rest = rest
        elif "" not in group or rest[:1] in (["-h"], ["--help"]):
            if rest and rest[0] not in {"-h", "--help"}:
                raise Failure(f"{name} has no command {rest[0]!r}; write {_listed(group)}", USAGE)
            out().write(_group_help(name))
            return 0 if rest else USAGE
    path = " ".join(filter(None, (_NAME, name, part)))
    function = function_of(name, part)
    try:
        values = read(path, function, rest)
        if name == "submit" and (given := _options_of_script(path, function, values["command"])):
            values = read(path, function, [*given, *rest])  # what was typed comes later, and wins
    except HelpWanted as help_text:
        out().write(str(help_text))
        return 0
    result = function(**values)
    return result if isinstance(result, int) else 0


def _options_of_script(path: str, function: Callable[..., Any], command: list[str]) -> list[str]:
    from .jobs.submit import options_in  # noqa: PLC0415 - for `submit` only

    script, words = options_in(command)
    try:
        if words and read(path, function, [*words, "--", "true"])["command"] != ["true"]:
            raise Failure("a word is not an option", USAGE)  # noqa: TRY301
    except Failure as failure:
        raise Failure(f"the #GPU lines of {script} cannot be used: {failure}", USAGE) from None
    return words


def _overview(*sections: dict[str, CommandPlace]) -> str:
    lines = [_USAGE]
    for section in sections:
        lines += [f"  {name:<14}{command.help}" for name, command in section.items()]
        others = {name: words for name, words in ALIASES.items() if words[0] in section}
        lines += [f"  {name:<14}Another word for {' '.join(words)}." for name, words in others.items()]
        lines.append("")
    return "\n".join([*lines, _FOOT, ""])


def _group_help(name: str) -> str:
    """The help of a group: that of the group alone, where it is a command, and a line for each of its commands."""
    command = COMMANDS[name]
    group = command.group or {}
    head = f"Usage: {_NAME} {name} {_listed(group, '|')} [OPTIONS]\n\n{command.help}\n"
    lines = [help_of(f"{_NAME} {name}", function_of(name)) + "\nCommands:" if "" in group else head]
    for part in filter(None, group):
        first = (function_of(name, part).__doc__ or "").strip().splitlines()[0]
        begin, *rest = wrap(first, 60)
        lines += [f"  {part:<14}{begin}", *(f"{'':<16}{line}" for line in rest)]
    return "\n".join([*lines, ""])


def _listed(group: dict[str, str], between: str = " or ") -> str:
    return between.join(part for part in group if part)


def _unknown(word: str) -> str:
    """What to type instead of a command that there is not."""
    import difflib  # noqa: PLC0415 - only where something is wrong

    from .foreign import hint_for  # noqa: PLC0415

    if not word.startswith("-") and (hint := hint_for(word)) is not None:
        return f"there is no command {word!r} here: {hint}"
    if word.startswith("-"):
        return f"give a command before {word} (`gpu-pool --help` lists them)"
    near = difflib.get_close_matches(word, [*COMMANDS, *ALIASES], 2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"there is no command {word!r}{meant} (`gpu-pool --help` lists them)"


def _failure_code(arguments: Sequence[str], code: int) -> int:
    """The exit code of a failure of gpu-pool. For `run` it is never 2, which may be its command's own."""
    return FAILED if code == USAGE and arguments[:1] == ["run"] else code
