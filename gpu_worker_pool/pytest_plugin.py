"""A plugin for pytest: the fixture `gpu` leases a GPU for the length of a test; `gpu_pool_server` is a server to test with.

    def test_it_trains(gpu):
        subprocess.run(["python", "train.py"], check=True)  # sees gpu.gpu_ids and no other GPU

    @pytest.mark.gpu(gpus=2, memory_mb=4000, model="A100", timeout=600, priority=5)
    def test_it_trains_on_two(gpu): ...

Tests wait in the queue, so tests of several processes (pytest-xdist), users and programs never have the same GPU at once.

If CUDA_VISIBLE_DEVICES is set when pytest starts, only those GPUs are requested.

CUDA reads CUDA_VISIBLE_DEVICES once in a process, when it is initialized. A process that initializes CUDA during a test
stays on that GPU: its lease is kept until the end of the session, and the next tests of that process get the same GPU.
A process that initialized CUDA before any test had a GPU sees all GPUs; a warning says so.

pytest loads this file in every run if the package is installed. So it imports the client only when a test uses the
fixture, and does nothing before.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from .client.pool_client import Assignment
    from .testing import ServerProcess

MARKER = (
    "gpu(gpus=1, memory_mb=None, model=None, min_memory=None, exclude=None, timeout=None, priority=0, time_limit=None, "
    "preemptible=False): what the fixture `gpu` leases for this test; with memory_mb the GPU is shared with requests that also "
    "say how much they need, min_memory is what the GPU must be sold with, such as '40GB', exclude has GPUs that may not be "
    "granted, timeout is how many seconds to wait, time_limit how long the lease lasts at most"
)
WISHES = (
    "gpus",
    "memory_mb",
    "model",
    "min_memory",
    "exclude",
    "priority",
    "timeout",
    "time_limit",
    "preemptible",
)
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEFAULT_TIMEOUT_S = 600.0
MISSING = ("fail", "skip")
# How long to wait for a first answer of any server. A server that refuses the connection is not waited for.
FIRST_ANSWER_S = 10.0
POLL_S = 0.05
# The longest label that a server accepts.
MAX_LABEL = 256


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and the ini file."""
    group = parser.getgroup("gpu", "GPUs for tests (gpu-worker-pool)")
    group.addoption(
        "--gpu-endpoint",
        metavar="URL",
        help="the GPU server to lease GPUs from, or several, separated by commas; by default as the environment says "
        "(GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINT), else http://localhost:8000",
    )
    timeout_help = f"how many seconds a test waits for its GPU before it fails; by default {DEFAULT_TIMEOUT_S:g}"
    group.addoption("--gpu-timeout", metavar="S", type=float, help=f"{timeout_help} (ini: gpu_timeout)")
    parser.addini("gpu_timeout", timeout_help, default=f"{DEFAULT_TIMEOUT_S:g}")
    missing_help = (
        "what to do with a test that can get no GPU, because no server answers, no server has such a GPU or "
        "CUDA_VISIBLE_DEVICES hides them: fail (the default) or skip, with the reason"
    )
    group.addoption("--gpu-missing", choices=MISSING, help=f"{missing_help} (ini: gpu_missing)")
    parser.addini("gpu_missing", missing_help, default=MISSING[0])


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for strict markers."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, _gpu_leases: _Leases) -> Iterator[Assignment]:
    """Lease a GPU for this test alone, and set CUDA_VISIBLE_DEVICES until the test ends. Returns the client's
    assignment.

    The marker `gpu` says what is requested. A test whose lease is lost fails, with the reason.
    """
    item: pytest.Item = request.node
    with _gpu_leases.lease(item) as assignment, pytest.MonkeyPatch.context() as patch:
        for name, value in assignment.env.items():
            patch.setenv(name, value)
        item.stash[_ASSIGNMENT] = assignment
        yield assignment


@pytest.fixture(scope="session")
def gpu_pool_server() -> Iterator[ServerProcess]:
    """A real server with four simulated GPUs, for all tests of this process; its `url` is for the code under test."""
    from .testing import ServerProcess  # noqa: PLC0415 - see above

    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="session")
def _gpu_leases(pytestconfig: pytest.Config) -> Iterator[_Leases]:
    """One client per process, from the first test that needs a GPU."""
    with closing(_Leases(pytestconfig)) as leases:
        yield leases


_ASSIGNMENT: pytest.StashKey[Assignment] = pytest.StashKey()
_IS_REPORTED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that ends on a GPU it has lost, whatever its outcome."""
    try:
        result = yield
    except BaseException as error:
        if loss := _report_loss(item):
            error.add_note(loss)
        raise
    if loss := _report_loss(item):
        _fail(loss)
    return result


def _report_loss(item: pytest.Item) -> str | None:
    assignment = item.stash.get(_ASSIGNMENT, None)
    if assignment is None or not assignment.is_lost:
        return None
    item.stash[_IS_REPORTED] = True
    return _loss(assignment)


def _loss(assignment: Assignment) -> str:
    reason = getattr(assignment.lost, "reason", None) or "no heartbeat got through in time"
    return (
        f"the lease on GPU {_names(assignment)} was lost during the test: {reason}; another holder may have the GPU now"
    )


class _Leases:
    """Leases GPUs for the tests of one process, one test after the other."""

    def __init__(self, config: pytest.Config) -> None:
        from . import GPUWorkerPool  # noqa: PLC0415 - loaded only for tests that use the fixture
        from .urls import split_endpoints  # noqa: PLC0415 - see above

        self._config = config
        self._timeout_s = _timeout_s(config)
        self._skips = _skips(config)
        given = config.getoption("gpu_endpoint")
        urls = split_endpoints(given or "")
        if given is not None and not urls:
            raise pytest.UsageError("--gpu-endpoint is empty; give it a URL, such as http://localhost:8000")
        options: dict[str, Any] = {"service_endpoints": urls} if len(urls) > 1 else {}
        try:
            self._pool = GPUWorkerPool(urls[0] if len(urls) == 1 else None, **options)
            self._pool.start()
        except ValueError as error:
            raise pytest.UsageError(f"the GPU server for the tests: {error}") from None
        self._has_answered = False
        # The caller's value; during a test the variable has the test's own.
        self._caller_sees = os.environ.get(VISIBLE)
        # Set once this process has initialized CUDA during a test, and so cannot leave that GPU.
        self._kept: tuple[Assignment, dict[str, Any]] | None = None
        self._sees_all_gpus = False

    def close(self) -> None:
        self._pool.stop()

    @contextmanager
    def lease(self, item: pytest.Item) -> Iterator[Assignment]:
        """Lease what this test requests, and release it at the end of the block."""
        wishes = _wishes(item)
        timeout_s, priority = wishes.pop("timeout", self._timeout_s), wishes.pop("priority", 0)
        assignment = self._take_kept(wishes)
        if assignment is None:
            self._check_for_early_cuda()
            assignment = self._request(item, timeout_s, {**wishes, "priority": priority})
        try:
            self._check_that_all_are_coordinated(assignment)
            yield assignment
        finally:
            self._release(item, assignment, wishes)

    def _request(self, item: pytest.Item, timeout_s: float, wishes: Mapping[str, Any]) -> Assignment:
        from . import PoolError, RequestRefusedError, ServiceUnavailableError  # noqa: PLC0415 - see above
        from .client.inherited_lease import inherited_lease  # noqa: PLC0415 - see above
        from .host.visible_devices import gpu_names_in  # noqa: PLC0415 - see above

        among = None if self._caller_sees is None else gpu_names_in(self._caller_sees)
        only = "" if among is None else f"; {VISIBLE}={self._caller_sees!r} allows no others"
        if inherited_lease(os.environ) is not None:
            among = None  # the lease around pytest has set it, and its GPUs are used
            only = "; pytest runs inside `gpu-pool run`: request more GPUs there (--gpus), or run pytest without it"
        elif os.environ.get("GPU_POOL_LEASE_ID") and self._caller_sees is not None:
            # The only visible GPUs are those that `gpu-pool run` holds: the request would wait for its own caller.
            _fail(
                f"pytest runs inside `gpu-pool run`, which holds the GPUs of {VISIBLE}; run it without, or unset {VISIBLE}"
            )
        if among == ():
            self._miss(f"{VISIBLE}={self._caller_sees!r} hides every GPU; unset it, or name GPUs that exist")
        self._wait_for_a_server()
        try:
            return self._pool.request_gpu(timeout_s, labels={"test": _label(item.nodeid)}, among=among, **wishes)
        except ServiceUnavailableError as error:
            self._miss(str(error))
        except RequestRefusedError as error:
            self._miss(f"{error}{only}")
        except (PoolError, TypeError, ValueError) as error:
            _fail(f"no GPU for this test: {error}{only}")

    def _wait_for_a_server(self) -> None:
        """Report now if no server answers: a request would wait for one until its timeout."""
        from . import ServiceUnavailableError  # noqa: PLC0415 - see above

        deadline = time.monotonic() + FIRST_ANSWER_S
        while not self._has_answered:
            found = self._pool.get_error_recovery_status()
            self._has_answered = bool(found["healthy_endpoints"])
            have_all_failed = all(stats["failure_count"] for stats in found["circuit_breaker_stats"].values())
            if self._has_answered:
                return
            if have_all_failed or time.monotonic() > deadline:
                self._miss(str(ServiceUnavailableError(found["errors"])))
            time.sleep(POLL_S)

    def _miss(self, reason: str) -> NoReturn:
        if self._skips:
            pytest.skip(f"no GPU for this test: {reason}")
        _fail(f"no GPU for this test: {reason} (--gpu-missing=skip skips such tests)")

    def _check_that_all_are_coordinated(self, assignment: Assignment) -> None:
        """Fail if tests in several processes use a server without leases: such a lease names no server."""
        processes = getattr(self._config, "workerinput", {}).get("workercount", 1)
        if processes > 1 and assignment.server_url is None:
            _fail(
                f"the GPU server {assignment.endpoint_id} has statistics only and no leases, so only the tests of one "
                f"process are coordinated, and these run in {processes}: they would be given the same GPUs. Run this "
                "package's server there (gpu-pool serve), or the tests in one process (-n 0)"
            )

    def _release(self, item: pytest.Item, assignment: Assignment, wishes: dict[str, Any]) -> None:
        from . import StaleAssignmentError  # noqa: PLC0415 - see above

        if not self._sees_all_gpus and not assignment.is_lost and _has_initialized_cuda():
            self._kept = (assignment, wishes)
            return
        if self._kept is not None:
            return  # it was kept and is lost; the next test fails too
        try:
            self._pool.release_gpu(assignment)
        except StaleAssignmentError:
            if not item.stash.get(_IS_REPORTED, False):
                _fail(_loss(assignment))

    def _take_kept(self, wishes: dict[str, Any]) -> Assignment | None:
        if self._kept is None:
            return None
        assignment, kept_wishes = self._kept
        advice = "run this test in a process of its own"
        where = f"this process has initialized CUDA on GPU {_names(assignment)} and cannot leave it"
        if assignment.is_lost:
            _fail(f"{where}, and {_loss(assignment)}; {advice}")
        if wishes != kept_wishes:
            _fail(f"{where}, but this test requests {_shown(wishes)}, not {_shown(kept_wishes)}; {advice}")
        return assignment

    def _check_for_early_cuda(self) -> None:
        if not self._sees_all_gpus and _has_initialized_cuda():
            self._sees_all_gpus = True
            warnings.warn(
                "CUDA was initialized in this process before a test had a GPU, for example by a check during collection. So "
                "it ignores the CUDA_VISIBLE_DEVICES of the test. Check inside the tests, or choose the device by "
                "gpu.gpu_id",
                pytest.PytestWarning,
                stacklevel=2,
            )


def _has_initialized_cuda() -> bool:
    from .host.visible_devices import has_initialized_cuda  # noqa: PLC0415 - see above

    return has_initialized_cuda()


def _wishes(item: pytest.Item) -> dict[str, Any]:
    """The wishes of all markers; the nearest wins, so that a test may differ from its class."""
    wishes: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers("gpu"))):
        unknown = [repr(value) for value in marker.args] + [name for name in marker.kwargs if name not in WISHES]
        if unknown:
            _fail(f"the marker gpu does not know {', '.join(unknown)}; it takes {', '.join(WISHES)}, each by name")
        wishes.update(marker.kwargs)
    return {name: value for name, value in wishes.items() if value is not None}


def _timeout_s(config: pytest.Config) -> float:
    given: float | None = config.getoption("gpu_timeout")
    if given is not None:
        return given
    text = config.getini("gpu_timeout")
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"gpu_timeout is {text!r}; it must be a number of seconds") from None


def _skips(config: pytest.Config) -> bool:
    chosen = config.getoption("gpu_missing") or config.getini("gpu_missing")
    if chosen not in MISSING:
        raise pytest.UsageError(f"gpu_missing is {chosen!r}; it must be one of {', '.join(MISSING)}")
    return bool(chosen == "skip")


def _label(nodeid: str) -> str:
    """A label that a server accepts; a long one is cut at the front, because the end tells more."""
    from .wire.bounds import is_printable  # noqa: PLC0415 - as above

    printable = "".join(sign if is_printable(sign) else "?" for sign in nodeid)
    return printable if len(printable) <= MAX_LABEL else f"...{printable[3 - MAX_LABEL :]}"


def _shown(wishes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in wishes.items()) or "any GPU"


def _names(assignment: Assignment) -> str:
    return ", ".join(map(str, assignment.gpu_ids))


def _fail(reason: str) -> NoReturn:
    pytest.fail(reason, pytrace=False)
