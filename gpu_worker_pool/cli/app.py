"""`gpu-pool` itself: its commands, and what becomes of what they raise."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gpu_worker_pool
from gpu_worker_pool.errors import PoolError

from .batch.command import batch
from .commands.drain import drain, undrain
from .commands.explain import explain
from .commands.leases import leases
from .commands.release import release
from .commands.report import report
from .commands.status import status
from .commands.wait import wait
from .demo.command import demo
from .doctor.command import doctor
from .failure import FAILED, SIGNAL_BASE, USAGE, Failure
from .output import complain, stop_printing
from .run.command import run
from .serve.command import serve
from .top.command import top


class _Unwritable(Exception):  # noqa: N818 - what happened
    """What there was to say could not be written."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Commands(TyperGroup):
    """typer would take a pipe that is closed for a failure, and any other such fault for a bug."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _told_as_unwritable():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _told_as_unwritable():
            return super().invoke(ctx)


@contextmanager
def _told_as_unwritable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error) from error
    except SystemExit as ended:
        # rich ends the program where a pipe is closed, also in what typer shows by it.
        if isinstance(ended.__context__, BrokenPipeError):
            raise _Unwritable(ended.__context__) from None
        raise


app = typer.Typer(
    name="gpu-pool",
    cls=_Commands,
    help="Hand out GPUs so that nobody collides.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


# What typer raises for what was typed wrong. Newer ones bring their own click, so it is found by what is derived from it.
_TypedWrong: Any = typer.BadParameter.mro()[2]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"gpu-pool {gpu_worker_pool.__version__}")  # noqa: T201 - that is what it is for
        raise typer.Exit


# Everything after the command's name is the command's own.
app.command(rich_help_panel="Run", context_settings={"allow_interspersed_args": False})(run)
app.command(rich_help_panel="Run")(batch)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


app.command(rich_help_panel="Look")(top)
app.command(rich_help_panel="Operate")(serve)
app.command(rich_help_panel="Operate")(doctor)
app.command(rich_help_panel="Run")(wait)
app.command(rich_help_panel="Look")(status)
app.command(rich_help_panel="Look")(leases)
app.command(rich_help_panel="Look")(explain)
app.command(rich_help_panel="Look")(report)
app.command(rich_help_panel="Operate")(release)
app.command(rich_help_panel="Operate")(drain)
app.command(rich_help_panel="Operate")(undrain)
app.command(rich_help_panel="Try")(demo)


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Whatever goes wrong is one line that says what to do."""
    try:
        result = app(args=list(arguments), prog_name="gpu-pool", standalone_mode=False)
        with _told_as_unwritable():
            sys.stdout.flush()
    except Failure as failure:
        complain(str(failure))
        return _own_failure(arguments, failure.code)
    except PoolError as error:
        complain(str(error))
        return FAILED
    except typer.Exit as exit_:
        return exit_.exit_code
    except _TypedWrong as error:
        where = getattr(error, "ctx", None)
        if message := error.format_message():  # none where it was called without anything, and showed its help
            complain(f"{message} (see `{where.command_path if where else 'gpu-pool'} --help`)")
        return _own_failure(arguments, USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return SIGNAL_BASE + signal.SIGINT
    except _Unwritable as unwritable:
        stop_printing()
        cause = unwritable.cause
        if isinstance(cause, BrokenPipeError):
            return SIGNAL_BASE + signal.SIGPIPE
        if cause.errno == errno.EIO:
            return SIGNAL_BASE + signal.SIGHUP  # the terminal is gone
        complain(f"cannot go on: {cause}")
        return FAILED
    return result if isinstance(result, int) else 0


def _own_failure(arguments: Sequence[str], code: int) -> int:
    """`run` ends with its command's exit code, and a command may well end with 2."""
    return FAILED if code == USAGE and arguments[:1] == ["run"] else code
