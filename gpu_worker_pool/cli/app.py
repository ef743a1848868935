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

from .declare import HelpWanted, read
from .output import OutputClosed, complain, is_output_broken, out, stop_printing


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
    "jobs": CommandPlace(".jobs.jobs", "List your jobs: what runs, what waits and why."),
    "logs": CommandPlace(".jobs.logs", "Print what a job wrote; -f follows it."),
    "cancel": CommandPlace(".jobs.job_control", "Stop jobs."),
    "status": CommandPlace(".commands.status", "Show every GPU, who holds it, and who waits; --watch follows it."),
    "explain": CommandPlace(".commands.explain", "Say why your requests wait, or tell about one lease."),
    "history": CommandPlace(".jobs.history", "Show jobs that are over, and how they ended."),
    "doctor": CommandPlace(".doctor.command", "Check this machine and the servers, and say what to do."),
}
MORE: Final = {
    "top": CommandPlace(".commands.status", "Follow the pool, as status --watch does."),
    "leases": CommandPlace(".commands.leases", "List all leases: those that hold GPUs and those that wait."),
    "release": CommandPlace(".commands.release", "End leases, or take requests out of the queue."),
    "retry": CommandPlace(".jobs.job_control", "Run jobs again that are over."),
    "join": CommandPlace(".run.command", "Run a command on this box's part of a lease of run --nodes."),
    "report": CommandPlace(".commands.report", "Add up GPU-hours by owner."),
    "reservations": CommandPlace(".commands.reserve", "List bookings and planned drains."),
    "login": CommandPlace(".commands.login", "Keep a server and your token there."),
    "logout": CommandPlace(".commands.login", "Forget a server and your token there."),
    "demo": CommandPlace(".demo.command", "See a pool at work: a worker and the server are killed."),
}
OPERATE: Final = {
    "serve": CommandPlace(".serve.command", "Start the server on this machine."),
    "drain": CommandPlace(".commands.drain", "Take GPUs out of service."),
    "undrain": CommandPlace(".commands.drain", "Put GPUs back into service."),
    "reserve": CommandPlace(".commands.reserve", "Book GPUs for an owner and a time."),
    "quota": CommandPlace(
        ".commands.quota",
        "Show and set how much each owner may use.",
        {"list": "list_quotas", "set": "set_quota", "remove": "remove_quota"},
    ),
    "token": CommandPlace(
        ".commands.token",
        "Show and set who may use the server from other machines.",
        {"list": "list_tokens", "add": "add_token", "revoke": "revoke_token"},
    ),
    "fleet": CommandPlace(
        ".commands.fleet",
        "Show the boxes of a fleet, and forget those that are gone.",
        {"": "show_fleet", "forget": "forget_node"},
    ),
    "backup": CommandPlace(".commands.backup", "Copy the pool of this box into one file."),
    "restore": CommandPlace(".commands.backup", "Put a backup in the place of the journal."),
    "keeper": CommandPlace(".jobs.keeper_command", "Run the submitted jobs; submit starts it by itself."),
}
COMMANDS: Final = EVERYDAY | MORE | OPERATE
_USAGE: Final = "Usage: gpu-pool COMMAND [OPTIONS]\n\nLease GPUs to jobs, so that no two of them collide.\n"
_FOOT: Final = "`gpu-pool COMMAND --help` tells about a command, `gpu-pool help operate` lists those for operators."
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
        out().write("")
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


def _run(typed: list[str]) -> int:
    match typed:
        case []:
            out().write(_overview(EVERYDAY))
            return USAGE
        case ["-h" | "--help" | "help"]:
            out().write(_overview(EVERYDAY, MORE))
            return 0
        case ["help", "operate"]:
            out().write(_overview(OPERATE))
            return 0
        case ["help", *name]:
            return _run([*name, "--help"])
        case ["--version"]:
            out().print(f"{_NAME} {gpu_worker_pool.__version__}")
            return 0
        case ["--show-completion" | "--install-completion" | "--complete" as what, *rest]:
            from . import completion  # noqa: PLC0415 - for shells only

            return completion.run(what, rest)
        case [name, *rest] if name in COMMANDS:
            return _command(name, rest)
    raise Failure(_unknown(typed[0]), USAGE)


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
    except HelpWanted as help_text:
        out().write(str(help_text))
        return 0
    result = function(**values)
    return result if isinstance(result, int) else 0


def _overview(*sections: dict[str, CommandPlace]) -> str:
    lines = [_USAGE]
    for section in sections:
        lines += [f"  {name:<14}{command.help}" for name, command in section.items()]
        lines.append("")
    return "\n".join([*lines, _FOOT, ""])


def _group_help(name: str) -> str:
    command = COMMANDS[name]
    lines = [f"Usage: {_NAME} {name} {_listed(command.group or {}, '|')} [OPTIONS]", "", command.help, ""]
    for part in command.group or {}:
        first = (function_of(name, part).__doc__ or "").strip().splitlines()[0]
        lines.append(f"  {part or '(alone)':<14}{first}")
    return "\n".join([*lines, ""])


def _listed(group: dict[str, str], between: str = " or ") -> str:
    return between.join(part for part in group if part)


def _unknown(word: str) -> str:
    """What to type instead of a command that there is not."""
    import difflib  # noqa: PLC0415 - only where something is wrong

    from .foreign import other_command  # noqa: PLC0415

    if (hint := other_command(word)) is not None:
        return f"there is no command {word!r} here: {hint}"
    if word.startswith("-"):
        return f"give a command before {word} (`gpu-pool --help` lists them)"
    near = difflib.get_close_matches(word, list(COMMANDS), 2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"there is no command {word!r}{meant} (`gpu-pool --help` lists them)"


def _failure_code(arguments: Sequence[str], code: int) -> int:
    """The exit code of a failure of gpu-pool. For `run` it is never 2, which may be its command's own."""
    return FAILED if code == USAGE and arguments[:1] == ["run"] else code
