"""Leases for this process itself: its environment shows it, and what it starts, the GPUs of the lease and no others."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, Unpack, cast, overload

from gpu_worker_pool.errors import RequestRefusedError
from gpu_worker_pool.host.enforcement import wait_for_access
from gpu_worker_pool.host.visible_devices import gpu_names_in, has_initialized_cuda
from gpu_worker_pool.models import Assignment

from .blocking import GPUWorkerPool
from .guarded_lease import command_env, is_set_by_lease
from .inherited_lease import LEASE_GPUS_VARIABLE, VISIBLE_DEVICES_VARIABLE
from .options import ClientOptions, LeaseOptions, RequestWishes, split
from .pool_client import GPUContextManager, GPUWorkerPoolClient

_ParamsT = ParamSpec("_ParamsT")
_ResultT = TypeVar("_ResultT")
TOO_LATE: Final = (
    "CUDA was initialized in this process before it had this lease, so this process ignores CUDA_VISIBLE_DEVICES and may use "
    "a GPU that is not its own. Only what it starts sees GPU {gpus}. Begin CUDA after the lease, or use GPUExecutor"
)
# The environment is that of the whole process, so one caller at a time may set it: the thread and its asyncio task. A call
# inside a call is the same caller's, and the last one in the list.
_callers: list[tuple[int, object]] = []
_environment = threading.Lock()
# The GPUs of the lease under which this process initialized CUDA: it cannot leave them.
_bound_to: tuple[str, ...] | None = None


class LeasedBlock(AbstractContextManager[Assignment]):
    """GPUs for the length of a `with` block, or as a decorator for the length of each call of a function.

    A decorated function, and what it starts, has the environment of the lease.
    """

    def __init__(self, timeout: float | None, wishes: RequestWishes, options: ClientOptions) -> None:
        self._timeout = timeout
        self._wishes, self._options = wishes, options
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Assignment:
        with ExitStack() as entering:
            pool = entering.enter_context(GPUWorkerPool(**self._options))
            assignment = entering.enter_context(pool.gpu(self._timeout, **self._wishes))
            self._entered.append(entering.pop_all())
        return assignment

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[_ParamsT, _ResultT]) -> Callable[_ParamsT, _ResultT]:
        """Decorate a function or a coroutine function: each call waits for GPUs of its own, and releases them at its end."""
        _check_function(function)
        if inspect.iscoroutinefunction(function):
            return cast("Callable[_ParamsT, _ResultT]", self._around_coroutine(function))

        @functools.wraps(function)
        def call(*args: _ParamsT.args, **kwargs: _ParamsT.kwargs) -> _ResultT:
            with _one_at_a_time():
                again = LeasedBlock(self._timeout, self._wishes_now(), self._options)
                with again as assignment, environment_of(assignment):
                    return function(*args, **kwargs)

        return call

    def _wishes_now(self) -> RequestWishes:
        """Once this process has initialized CUDA on the GPUs of a lease, it can use no others."""
        is_bound = _bound_to is not None and self._wishes.get("among") is None
        return {**self._wishes, "among": _bound_to} if is_bound else _within_sight(self._wishes)

    def _around_coroutine(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with _one_at_a_time():
                client = GPUWorkerPoolClient(**self._options)
                block = GPUContextManager(client, self._timeout, **self._wishes_now())
                async with client, block:
                    assert block.assignment is not None  # noqa: S101 - it is entered
                    with environment_of(block.assignment):
                        return await function(*args, **kwargs)

        return call


def _check_function(function: object) -> None:
    """Raise TypeError unless it is done when its call returns."""
    name = getattr(function, "__qualname__", repr(function))
    kinds: dict[str, Callable[[object], bool]] = {
        "a class": inspect.isclass,
        "a generator function": inspect.isgeneratorfunction,
        "an async generator function": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(function):
            raise TypeError(
                f"{name} is {kind}, which goes on when its call has returned; use `with gpu_worker_pool.gpu()` in a plain "
                "function, or GPUExecutor"
            )
    if not callable(function):
        raise TypeError(f"{name} is not a function; decorate a plain function")


@overload
def gpu(timeout: Callable[_ParamsT, _ResultT], /) -> Callable[_ParamsT, _ResultT]: ...


@overload
def gpu(timeout: float | None = None, **asked: Unpack[LeaseOptions]) -> LeasedBlock: ...


def gpu(timeout: float | Callable[..., Any] | None = None, **asked: Unpack[LeaseOptions]) -> Any:
    """A GPU for the length of a `with` block, for a program that needs no more than that; or, as a decorator, for the length
    of each call of a function, which then has the environment of the lease. As a decorator it needs no parentheses.

    The wishes are those of `request_gpu`; all other options go to the client (service_endpoint=..., token=...).
    """
    if callable(timeout):
        return LeasedBlock(None, *split("gpu", asked))(timeout)
    if timeout is not None and not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or a function to decorate")
    return LeasedBlock(timeout, *split("gpu", asked))


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    caller = (threading.get_ident(), _current_task())
    with _environment:
        # A function without a task is on the stack of its thread, so what this thread does is inside of it.
        if _callers and _callers[-1] not in {caller, (caller[0], None)}:
            raise RuntimeError(
                "another thread or asyncio task of this process is in a function on leased GPUs, and a process has one "
                "environment; use GPUExecutor for several at once, or `with gpu_worker_pool.gpu()` and the env of the assignment"
            )
        _callers.append(caller)
    try:
        yield
    finally:
        with _environment:
            _callers.pop()


def _current_task() -> object:
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:
        return None


@contextmanager
def environment_of(assignment: Assignment) -> Iterator[None]:
    """Have the environment of a lease for the length of a block."""
    undo = set_environment(assignment)
    try:
        yield
    finally:
        undo()


def set_environment(assignment: Assignment) -> Callable[[], None]:
    """Set the environment of this process to that of a lease; returns what sets it back. A RuntimeWarning says that it is
    too late for CUDA in this process.
    """
    was_initialized = has_initialized_cuda()
    if was_initialized and _bound_to != assignment.uuids:
        warnings.warn(TOO_LATE.format(gpus=", ".join(map(str, assignment.gpu_ids))), RuntimeWarning, stacklevel=4)
    wait_for_access(assignment.uuids)
    told = command_env({}, assignment)
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)

    def undo() -> None:
        global _bound_to  # noqa: PLW0603 - a fact about this process
        if not was_initialized and has_initialized_cuda():
            _bound_to = assignment.uuids
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return undo


def _within_sight(wishes: RequestWishes) -> RequestWishes:
    """The wishes, among the GPUs that this process can use: those that its CUDA_VISIBLE_DEVICES names. RequestRefusedError if it
    names none.

    A wish for certain GPUs wins, and so does a lease around this process, which has set the variable.
    """
    value = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    is_inside = bool(os.environ.get(LEASE_GPUS_VARIABLE)) and is_set_by_lease(os.environ)
    if value is None or wishes.get("among") is not None or is_inside:
        return wishes
    if not (names := gpu_names_in(value)):
        problem = (
            f"{VISIBLE_DEVICES_VARIABLE}={value!r} names no GPU; unset it, or name GPUs that `gpu-pool status` shows"
        )
        raise RequestRefusedError({"this process": problem})
    return {**wishes, "among": names}


class ProcessLease:
    """A lease that this process keeps until it ends, or until `release`."""

    def __init__(self, timeout: float | None, asked: LeaseOptions) -> None:
        wishes, options = split("lease_for_process", asked)
        wishes = _within_sight(wishes)
        options["on_lost"] = options.get("on_lost") or _end_this_process
        with ExitStack() as entering:
            pool = entering.enter_context(GPUWorkerPool(**options))
            self.assignment = pool.request_gpu(timeout, **wishes)
            entering.callback(set_environment(self.assignment))
            self._entered = entering.pop_all()

    def release(self) -> None:
        """Release the lease, and set the environment back."""
        self._entered.close()


def _end_this_process(_: Assignment) -> None:
    # The client has logged why. To go on would be to use a GPU that another holder may have by now.
    os.kill(os.getpid(), signal.SIGTERM)


_own: tuple[int, ProcessLease, Mapping[str, object]] | None = None


def lease_for_process(timeout: float | None = None, **asked: Unpack[LeaseOptions]) -> Assignment:
    """Lease GPUs for the rest of this process, and set its environment: an initializer for pools of processes.

    `asked` are the wishes of `request_gpu` and the options of the client. Called again, it returns the same lease;
    ValueError if that is asked for differently. If the lease is lost, `on_lost` is called with it; by default the process
    ends by SIGTERM.
    """
    global _own  # noqa: PLW0603 - there is one for each process
    compared = {name: value for name, value in asked.items() if name != "on_lost"}
    if _own is not None and has_lease_for_process():
        if _own[2] != compared:
            raise ValueError(
                f"this process has a lease for {_own[2]} already, and {compared} was asked for; release it first"
            )
        return _own[1].assignment
    _own = (os.getpid(), lease := ProcessLease(timeout, asked), compared)
    return lease.assignment


def has_lease_for_process() -> bool:
    """Whether `lease_for_process` has leased GPUs for this process, and they are not released."""
    return _own is not None and _own[0] == os.getpid()


def release_for_process() -> None:
    """Release the lease of this process; harmless if there is none."""
    global _own
    own, _own = _own, None
    if own is not None and own[0] == os.getpid():
        own[1].release()
