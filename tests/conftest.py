"""For all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from gpu_worker_pool.testing import ServerProcess
from tests.preloaded import NO_CERTIFICATES, ROOT, PreloadedPopen

# Applications in the tests' own process may read the same stand-in for a GPU as those of another worker.
os.environ.setdefault("GPU_POOL_LOCK_SCOPE", f"test-{os.getpid()}")
# Nobody is logged in, whatever the logins of the user who runs the tests.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
# The servers of tests leave no socket where those of this machine are, and their clients use none of these.
os.environ.setdefault("GPU_POOL_SOCKET", "")

# With what the caller has set for Python itself, no process that inherits it could be a fork of the loaded one.
for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)
os.environ.update(NO_CERTIFICATES)

# `nohup make test` and `make test &` in a script start it with signals ignored, which every process of a test would inherit.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Servers that programs of examples, documents and tests/test_pytest_plugin.py start, start as a user's.
ServerProcess.popen = PreloadedPopen

# Hypothesis would take an example that is slow on a busy machine for a failure. All else stays as the profile in force has
# it, which on a machine of continuous integration is another one.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# The files that take longest, most of it waiting. They begin first, so that there is always somebody else to use the
# processors meanwhile, and no worker is left alone with one of them at the end.
LONGEST = (
    "tests/e2e/fleet/test_lost_commits.py",
    "tests/e2e/fleet/test_take_over.py",
    "tests/e2e/test_nemesis.py",
    "tests/fleet/test_histories.py",
    "tests/cli/run/test_nested.py",
    "tests/cli/run/test_time_limit.py",
    "tests/fleet/test_more_histories.py",
    "tests/client/endpoints/failover/test_failover.py",
    "tests/page/test_accessible.py",
    "tests/page/test_many.py",
    "tests/e2e/fleet/test_nemesis.py",
    "tests/core/test_pool_properties.py",
    "tests/page/test_live.py",
    "tests/cli/batch/test_batch_endings.py",
    "tests/test_documents.py",
    "tests/client/acquire/test_lost.py",
    "tests/page/test_odd_ways.py",
    "tests/e2e/fleet/test_bad_input.py",
    "tests/e2e/test_failpoints.py",
    "tests/client/blocking/test_interrupts_and_forks.py",
    "tests/server/box/test_deaths.py",
    "tests/gpus/test_nvidia_smi.py",
    "tests/page/test_page_access.py",
    "tests/client/acquire/test_endings.py",
    "tests/client/endpoints/failover/test_waiting.py",
    "tests/cli/run/test_run.py",
    "tests/page/test_hardware.py",
    "tests/page/test_real_fleet.py",
    "tests/benchmarks/test_measures.py",
    "tests/documents/test_site.py",
    "tests/server/test_real_probes.py",
    "tests/cli/demo/test_demo.py",
    "tests/test_examples.py",
    "tests/test_pytest_plugin.py",
    "tests/client/acquire/cleanup/test_cleanup.py",
    "tests/server/authority/test_lease_restart.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share the files (pytest-xdist), in our order, and not those with the most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if hasattr(config, "workerinput"):
        # Where a group of processes is orphaned while one of it is stopped, the kernel sends SIGHUP to all of it.
        os.setpgid(0, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """What is loaded stays: no garbage collection looks through it, neither now nor later. And garbage in cycles is rare, so
    tests look for it seldom: that saves a tenth of the time of those that only calculate.
    """
    gc.disable()
    _compile_part(session.config)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)
        gc.enable()


def _compile_part(config: pytest.Config) -> None:
    """Of what is not compiled yet, as in a fresh clone, each worker compiles a part. Else each would compile all of it, in
    the same order as the others.
    """
    if not hasattr(config, "workerinput"):
        return
    number, workers = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    sources = [*sorted(ROOT.glob("tests/**/test_*.py")), *sorted(ROOT.glob("gpu_worker_pool/**/*.py"))]
    for source in sources[number::workers]:
        folder = rewrite.get_cache_dir(source)
        compiled = folder / f"{source.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() and rewrite.try_makedirs(folder):
            source_hash, code = rewrite._rewrite_test(source, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first; all else as it was."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured, by record_property("measured", ...): what they print themselves is not seen where they pass."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"measured: {value}")


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Generator[None]:
    """An application that runs in the tests' own process configures the logs of that process."""
    loggers = [logging.getLogger(name) for name in ("gpu_worker_pool", "uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        if (logger.level, logger.propagate) != (level, propagate):
            logger.setLevel(level)
            logger.handlers, logger.propagate = handlers, propagate
