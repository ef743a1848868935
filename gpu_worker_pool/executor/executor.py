"""`GPUExecutor`: a pool of processes like ProcessPoolExecutor's, each with GPUs of its own."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures.process import _chain_from_iterable_of_lists, _process_chunk
from contextlib import suppress
from functools import partial
from itertools import islice
from numbers import Integral
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, Unpack

from gpu_worker_pool.amounts import asked_mb
from gpu_worker_pool.client.asking import make_request
from gpu_worker_pool.client.inherited_lease import config_inside
from gpu_worker_pool.client.local_client import UNLIMITED_S, LocalClient, environ_outside
from gpu_worker_pool.client.options import ClientOptions, RequestWishes
from gpu_worker_pool.core.model.bounds import check_number, check_whole

from .crew_thread import CrewThread, threads
from .errors import ExecutorBrokenError
from .worker_process import WorkerOptions

_ParamsT = ParamSpec("_ParamsT")
_ResultT = TypeVar("_ResultT")
_MOST_RETRIES: Final = 1_000_000
# How often Ctrl-C asks for an end; after that the program ends, and the guards end the workers.
_MOST_INTERRUPTS: Final = 2


class GPUExecutor(Executor):
    """Runs tasks in worker processes, each on a lease of its own: CUDA_VISIBLE_DEVICES is set before they start.

    A lease is requested when there is a task for it, and released when there was none for `idle_release_s`. Every worker
    has `gpus` GPUs, or shares them with `memory_mb` (or `memory="8GB"`); the wishes are those of `request_gpu`. Without `max_workers`, there are as many workers as
    there are GPUs for. A task whose worker dies or loses its lease raises WorkerLostError, or is repeated up to `retries`
    times. `lease_timeout_s` limits the wait for a GPU, `time_limit` every lease. A worker that must end has `grace_s`
    between SIGTERM and SIGKILL. `initializer`, `initargs` and `max_tasks_per_child` are those of ProcessPoolExecutor. All
    other options go to the client (service_endpoint=..., token=...).
    """

    def __init__(
        self,
        max_workers: int | None = None,
        gpus: int = 1,
        memory_mb: float | None = None,
        model: str | None = None,
        preemptible: bool = False,  # noqa: FBT001, FBT002 - the same
        *,
        memory: str | float | None = None,
        min_memory_mb: float | None = None,
        min_memory: str | float | None = None,
        among: Iterable[int | str] | None = None,
        exclude: Iterable[int | str] | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        time_limit: float | str | None = None,
        new: bool = False,
        retries: int = 0,
        idle_release_s: float = 10.0,
        lease_timeout_s: float | None = None,
        grace_s: float = 10.0,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(f"GPUExecutor works on Linux only, and this is {sys.platform}")
        _check_count("max_workers", max_workers)
        _check_count("max_tasks_per_child", max_tasks_per_child)
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        check_whole("retries", retries, 0, _MOST_RETRIES)
        for name, seconds in {"idle_release_s": idle_release_s, "grace_s": grace_s}.items():
            check_number(name, seconds, 0, UNLIMITED_S)
        if lease_timeout_s is not None:
            check_number("lease_timeout_s", lease_timeout_s, 0, UNLIMITED_S)
        wishes: RequestWishes = {
            "gpus": gpus,
            "memory_mb": asked_mb(memory_mb, memory),
            "model": model,
            "min_memory_mb": asked_mb(min_memory_mb, min_memory, "min_memory"),
            "priority": priority,
            "labels": labels,
            "time_limit": time_limit,
            "preemptible": preemptible,
            "new": new,
        }
        if among is not None:
            wishes["among"] = tuple(map(str, among))
        if exclude is not None:
            wishes["exclude"] = tuple(map(str, exclude))
        client = _client(options, is_new=new)
        _check_limit(make_request(client.config, "", wishes).time_limit_s, grace_s)
        self._crew = CrewThread(
            WorkerOptions(
                max_workers,
                retries,
                idle_release_s,
                max_tasks_per_child,
                wishes,
                client,
                lease_timeout_s,
                grace_s,
                initializer,
                tuple(initargs),
            )
        )
        # As ProcessPoolExecutor: tasks of an executor that is forgotten are still done.
        weakref.finalize(self, self._crew.close).atexit = False

    def __repr__(self) -> str:
        if self._broken:
            return "<GPUExecutor: broken>"
        return f"<GPUExecutor: {'shut down' if self._crew.is_closed else repr(self._crew)}>"

    @property
    def _broken(self) -> ExecutorBrokenError | None:
        # The name that it has in the executors of the standard library.
        return self._crew.broken

    def submit(
        self, fn: Callable[_ParamsT, _ResultT], /, *args: _ParamsT.args, **kwargs: _ParamsT.kwargs
    ) -> Future[_ResultT]:
        """Have a worker call it; returns the future. Function, arguments and result must be picklable."""
        if _exiting.is_set():
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        future: Future[_ResultT] = Future()
        self._crew.submit(future, fn, args, kwargs)
        return future

    def map(
        self,
        fn: Callable[..., _ResultT],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[_ResultT]:
        """Call it for each item, as `map` does; results come in the order of the items. `chunksize` items are one
        task.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        chunks = _chunked(zip(*iterables, strict=False), chunksize)
        # As ProcessPoolExecutor does it.
        done = super().map(partial(_process_chunk, fn), chunks, timeout=timeout)
        results: Iterator[_ResultT] = _chain_from_iterable_of_lists(done)
        return results

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as in the base
        """Accept no more tasks. With `wait`, return when all are done and every lease is released; Ctrl-C then ends the
        tasks. With `cancel_futures`, tasks that have not begun are cancelled.
        """
        self._crew.close(cancels_tasks=cancel_futures)
        if wait:
            _wait_for_end([self._crew])

    def terminate_workers(self) -> None:
        """End the tasks that run and cancel those that wait, and return when every lease is released. ProcessPoolExecutor has
        a method of this name from Python 3.14 on.
        """
        self._crew.interrupt()
        self.shutdown(wait=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # After Ctrl-C the user wants an end, and not that of all tasks that wait.
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.terminate_workers()
        else:
            self.shutdown(wait=True)
        return None


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    # Those of numpy are whole numbers too.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")  # noqa: TRY004 - as all others
    if value <= 0:
        raise ValueError(f"{name} is {value}; it must be greater than 0")


def _check_limit(limit_s: float | None, grace_s: float) -> None:
    """A worker is told to end `grace_s` before the limit of its lease: without a task, if that is at once."""
    if limit_s is not None and limit_s < 2 * grace_s:
        raise ValueError(
            f"time_limit is {limit_s:g} s and grace_s is {grace_s:g} s: workers get SIGTERM grace_s before the limit, which "
            f"leaves too little time for a task; time_limit must be at least twice grace_s ({2 * grace_s:g} s), or grace_s "
            f"at most {limit_s / 2:g}"
        )


def _client(options: ClientOptions, *, is_new: bool) -> LocalClient:
    """The client of the workers. `is_new`: for other GPUs than those of the lease around this process."""
    asked: dict[str, Any] = dict(options)
    hooks = {name: asked.pop(name, None) for name in ("on_event", "on_lost", "on_ending")}
    config, lease = config_inside(**asked)
    environ = os.environ if lease is None else environ_outside(os.environ)
    return LocalClient(config, environ, lease=None if is_new else lease, counts_gpus=True, **hooks)


def _wait_for_end(waited_for: Iterable[CrewThread]) -> None:
    """Wait until these have ended. Ctrl-C ends their tasks, and is raised when they have ended."""
    interrupted: list[KeyboardInterrupt] = []
    for crew in waited_for:
        while True:
            try:
                if interrupted:
                    crew.interrupt()
                crew.join()
                break
            except KeyboardInterrupt as error:
                interrupted.append(error)
                if len(interrupted) > _MOST_INTERRUPTS:
                    raise
    if interrupted:
        raise interrupted[0]


_exiting = threading.Event()


def _at_interpreter_exit() -> None:
    """As ProcessPoolExecutor: a program ends when its tasks are done; at once, if Ctrl-C has ended it."""
    _exiting.set()
    own = [crew for crew in threads if crew.is_own]
    for crew in own:
        if issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt):
            crew.interrupt()
        else:
            crew.close()
    try:
        _wait_for_end(own)
    except KeyboardInterrupt:
        _end_as_interrupted()
        raise


def _end_as_interrupted() -> None:
    """Have the program end as one that Ctrl-C has ended (130 in a shell). What is raised at the end of the interpreter is
    shown, and changes no exit code; but Python remembers that text it has run was interrupted, and acts on that at last.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102 - text, and not code: see above


def _chunked(items: Iterable[_ResultT], size: int) -> Iterator[tuple[_ResultT, ...]]:
    iterator = iter(items)
    while chunk := tuple(islice(iterator, size)):
        yield chunk


def _after_fork() -> None:
    for crew in list(threads):
        crew.forget()


# Before the threads are joined at the end of the program; ProcessPoolExecutor registers itself in the same way.
threading._register_atexit(_at_interpreter_exit)  # type: ignore[attr-defined] # noqa: SLF001
os.register_at_fork(after_in_child=_after_fork)
