"""`gpu-pool`: its commands, and the exit codes for what they raise."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import gpu_worker_pool
from gpu_worker_pool.errors import PoolError

from .failure import FAILED, SIGNAL_BASE, USAGE, Failure
from .options import Endpoints, Json
from .output import complain, is_output_broken, stop_printing
from .plain_values import spare_conversion


class _Unwritable(Exception):  # noqa: N818 - what happened
    """Something cannot be written or read; the output itself where its reader is gone."""

    def __init__(self, cause: OSError, *, is_reader_gone: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.is_reader_gone = is_reader_gone


def _in_words(params: list[Any]) -> list[Any]:
    """The parameters, whose values the help names in words: typer would show `<bool>` or `<int range> [1<=x<=1024]`."""
    for param in params:
        spare_conversion(param)
        if param.param_type_name == "argument":
            param.display_type_rich = lambda **_: None
        elif getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        param._get_number_range_help_str = lambda: ""  # noqa: SLF001 - there is no other way
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _in_words(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage by the arguments' own words, which say what is optional and what repeats: typer would add braces."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(argument.metavar) for argument in arguments)]


class _Commands(TyperGroup):
    """The commands. typer alone would treat a closed pipe as a failure, and any other OSError as a bug."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _in_words(super().get_params(ctx))

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _as_unwritable():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _as_unwritable():
            return super().invoke(ctx)


@contextmanager
def _as_unwritable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error, is_reader_gone=is_output_broken()) from error
    except SystemExit as ended:
        # rich ends the program when a pipe is closed, also in what typer prints with it.
        if isinstance(ended.__context__, BrokenPipeError):
            raise _Unwritable(ended.__context__, is_reader_gone=True) from None
        raise


# What typer raises for invalid arguments. Newer versions bring their own click, so a subclass leads to the class.
_UsageError: Any = typer.BadParameter.mro()[2]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"gpu-pool {gpu_worker_pool.__version__}")  # noqa: T201 - the result
        raise typer.Exit


class _CommandModule(NamedTuple):
    """Where a command is, and under which heading the help has it. A group has several commands by name."""

    module: str
    panel: str
    of_group: Mapping[str, str] | None = None


# In the order of the help. Each is loaded only if it is asked for: a command takes longer to load than `run` to start.
_PLACES: Final = {
    "run": _CommandModule(".run.command", "Run"),
    "join": _CommandModule(".run.command", "Run"),
    "batch": _CommandModule(".batch.command", "Run"),
    "submit": _CommandModule(".jobs.submit", "Run"),
    "jobs": _CommandModule(".jobs.jobs", "Jobs"),
    "logs": _CommandModule(".jobs.logs", "Jobs"),
    "cancel": _CommandModule(".jobs.job_control", "Jobs"),
    "retry": _CommandModule(".jobs.job_control", "Jobs"),
    "history": _CommandModule(".jobs.history", "Jobs"),
    "keeper": _CommandModule(".jobs.keeper_command", "Operate"),
    "top": _CommandModule(".top.command", "Look"),
    "serve": _CommandModule(".serve.command", "Operate"),
    "doctor": _CommandModule(".doctor.command", "Operate"),
    "status": _CommandModule(".commands.status", "Look"),
    "leases": _CommandModule(".commands.leases", "Look"),
    "explain": _CommandModule(".commands.explain", "Look"),
    "report": _CommandModule(".commands.report", "Look"),
    "release": _CommandModule(".commands.release", "Operate"),
    "reservations": _CommandModule(".commands.reserve", "Look"),
    "reserve": _CommandModule(".commands.reserve", "Operate"),
    "drain": _CommandModule(".commands.drain", "Operate"),
    "undrain": _CommandModule(".commands.drain", "Operate"),
    "backup": _CommandModule(".commands.backup", "Operate"),
    "restore": _CommandModule(".commands.backup", "Operate"),
    "demo": _CommandModule(".demo.command", "Try"),
    "quota": _CommandModule(
        ".commands.quota", "Operate", {"set": "set_quota", "list": "list_quotas", "remove": "remove_quota"}
    ),
    "token": _CommandModule(
        ".commands.token", "Operate", {"add": "add_token", "list": "list_tokens", "revoke": "revoke_token"}
    ),
    "login": _CommandModule(".commands.login", "Look"),
    "logout": _CommandModule(".commands.login", "Look"),
    "fleet": _CommandModule(".commands.fleet", "Operate", {"forget": "forget_node"}),
}


def commands(*names: str) -> typer.Typer:
    """The command line with these commands; with all of them if none is named."""
    app = typer.Typer(
        name="gpu-pool",
        cls=_Commands,
        help="Lease GPUs to jobs, so that no two of them collide.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names or _PLACES:
        module, panel, of_group = _PLACES[name]
        loaded = import_module(module, __package__)
        if of_group is None:
            # Everything after the first word that is not an option belongs to the command that is to be run.
            settings = {"allow_interspersed_args": False} if name in {"run", "submit"} else None
            app.command(cls=_Command, rich_help_panel=panel, context_settings=settings)(getattr(loaded, name))
            continue
        group = _fleet(loaded.show_fleet) if name == "fleet" else _group(_GROUPS[name])
        for part, function in of_group.items():
            group.command(part, cls=_Command)(getattr(loaded, function))
        app.add_typer(group, name=name, rich_help_panel=panel)
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_GROUPS: Final = {
    "quota": "Show and set who may use how much.",
    "token": "Show and set who may use the server from other machines.",
}


def _group(help_text: str) -> typer.Typer:
    return typer.Typer(cls=_Commands, no_args_is_help=True, help=help_text)


def _fleet(show_fleet: Callable[..., None]) -> typer.Typer:
    fleet = typer.Typer(cls=_Commands, help="Show the boxes of a fleet, and forget those that are gone.")

    @fleet.callback(invoke_without_command=True)
    def show(ctx: typer.Context, endpoint: Endpoints = None, *, json: Json = False) -> None:
        """Show the boxes of the fleet: who leads, who follows, which are agents only, and which are not heard of."""
        if ctx.invoked_subcommand is None:
            show_fleet(endpoint, json=json)

    return fleet


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. A failure is one line on standard error."""
    named = [name for name in arguments[:1] if name in _PLACES]
    try:
        result = commands(*named)(args=list(arguments), prog_name="gpu-pool", standalone_mode=False)
        with _as_unwritable():
            sys.stdout.flush()
    except Failure as failure:
        complain(str(failure))
        return _failure_code(arguments, failure.code)
    except PoolError as error:
        complain(str(error))
        return FAILED
    except typer.Exit as exit_:
        return exit_.exit_code
    except _UsageError as error:
        where = getattr(error, "ctx", None)
        if message := error.format_message():  # it is empty where there were no arguments and the help was shown
            complain(f"{message} (see `{where.command_path if where else 'gpu-pool'} --help`)")
        return _failure_code(arguments, USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return SIGNAL_BASE + signal.SIGINT
    except _Unwritable as unwritable:
        stop_printing()
        cause, is_reader_gone = unwritable.cause, unwritable.is_reader_gone
        if is_reader_gone and isinstance(cause, BrokenPipeError):
            return SIGNAL_BASE + signal.SIGPIPE
        if is_reader_gone and cause.errno == errno.EIO:
            return SIGNAL_BASE + signal.SIGHUP  # the terminal is gone
        complain(f"cannot continue: {cause}")
        return FAILED
    return result if isinstance(result, int) else 0


def _failure_code(arguments: Sequence[str], code: int) -> int:
    """The exit code of a failure of gpu-pool. For `run` it is never 2, which may be its command's own."""
    return FAILED if code == USAGE and arguments[:1] == ["run"] else code
