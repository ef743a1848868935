"""CPython's own test cases for executors, run on GPUExecutor where this Python has them installed."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import unittest
from collections.abc import Iterator
from multiprocessing.context import SpawnContext
from typing import Any, ClassVar

import pytest

from gpu_worker_pool import GPUExecutor
from gpu_worker_pool.testing import ServerProcess

PACKAGE = "test.test_concurrent_futures"
# Where the cases are since Python 3.12; before, all are in one module.
MODULES = {
    "ProcessPoolExecutorTest": "test_process_pool",
    "WaitTests": "test_wait",
    "AsCompletedTests": "test_as_completed",
    "ExecutorShutdownTest": "test_shutdown",
    "ExecutorDeadlockTest": "test_deadlock",
    "InitializerMixin": "test_init",
    "FailingInitializerMixin": "test_init",
    "BaseTestCase": "util",
}
INNER = "it looks into the inner state of ProcessPoolExecutor"
NAMED = "its program imports the executor by name from concurrent.futures; test_program_ends.py has the same for ours"
ALONE = "a task that cannot be unpickled fails alone here, and breaks no pool; test_tasks.py shows it"
LEFT_OUT = {
    "test_killed_child": INNER,
    "test_saturation": INNER,
    "test_idle_process_reuse_one": INNER,
    "test_idle_process_reuse_multiple": INNER,
    "test_max_tasks_per_child": INNER,
    "test_max_tasks_per_child_defaults_to_spawn_context": INNER,
    "test_shutdown_deadlock_pickle": INNER,
    "test_gh105829_should_not_deadlock_if_wakeup_pipe_full": INNER,
    "test_python_finalization_error": INNER,
    "test_force_shutdown_workers": INNER,
    "test_cancel_futures": "here no task has begun by then, because the leases take longer; test_shutdown.py shows it",
    "test_max_workers_too_large": "it is about Windows",
    "test_interpreter_shutdown": NAMED,
    "test_submit_after_interpreter_shutdown": NAMED,
    "test_hang_gh83386": NAMED,
    "test_hang_gh94440": NAMED,
    "test_exit_at_task_unpickle": ALONE,
    "test_error_at_task_unpickle": ALONE,
    "test_error_during_result_unpickle_in_result_handler": ALONE,
    "test_exit_during_result_unpickle_in_result_handler": ALONE,
}

try:
    cases = importlib.import_module(PACKAGE)
except (ImportError, unittest.SkipTest) as error:
    pytest.skip(
        f"this Python has no {PACKAGE} ({error}); on Debian it is in libpython3-testsuite", allow_module_level=True
    )


class _Server:
    """Of this module."""

    url: ClassVar[str] = ""


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with ServerProcess({"SIMULATED_GPUS": "8", "GPU_POOL_DURABILITY": "normal"}) as server:
        _Server.url = server.url
        yield
        assert [lease for lease in server.json("/leases")["leases"] if lease["state"] != "draining"] == []


class LeasedExecutor(GPUExecutor):
    """Made as the cases make a ProcessPoolExecutor."""

    def __init__(self, max_workers: int | None = None, mp_context: object = None, **options: Any) -> None:
        super().__init__(max_workers, service_endpoint=_Server.url, **options)
        self._max_workers = max_workers


class LeasedMixin:
    executor_type = LeasedExecutor
    ctx = "spawn"

    def get_context(self) -> SpawnContext:
        return multiprocessing.get_context("spawn")


def _case(name: str) -> Any:
    module = cases if hasattr(cases, name) else importlib.import_module(f"{PACKAGE}.{MODULES[name]}")
    return getattr(module, name)


def _executor_mixin() -> Any:
    module = cases if hasattr(cases, "ExecutorMixin") else importlib.import_module(f"{PACKAGE}.util")
    return module.ExecutorMixin


def _leased(name: str) -> type[unittest.TestCase]:
    """The cases of this class for GPUExecutor."""

    def left_out(_: object) -> None: ...

    own = {case: unittest.skip(reason)(left_out) for case, reason in LEFT_OUT.items() if hasattr(_case(name), case)}
    found: type[unittest.TestCase] = type(
        f"Leased{name}", (_case(name), LeasedMixin, _executor_mixin(), _case("BaseTestCase")), own
    )
    return found


for _name in sorted(MODULES.keys() - {"BaseTestCase"}):
    setattr(sys.modules[__name__], f"Leased{_name}", _leased(_name))
