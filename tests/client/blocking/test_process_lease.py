"""A lease for the process itself: the decorator `gpu`, and the initializer of pools of processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest

import gpu_worker_pool
from gpu_worker_pool import RequestRefusedError, gpu, lease_for_process, release_for_process
from gpu_worker_pool.client import process_lease
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import Child, active
from tests.server.leasing import eventually, release, take

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_to_child() -> str:
    program = f"import os; print(os.environ[{VISIBLE!r}], end='')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def visible() -> str | None:
    return os.environ.get(VISIBLE)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    before = environment()
    yield
    process_lease._bound_to = None
    assert environment() == before


class TestDecorator:
    def test_a_call_and_what_it_starts_has_a_gpu_of_its_own(self, server: ServerProcess) -> None:
        @gpu_worker_pool.gpu(memory="8GB", service_endpoint=server.url)
        def train(number: int, *, factor: int) -> tuple[int, str | None, str]:
            """Train."""
            (lease,) = (one for one in server.json("/leases")["leases"] if one["state"] == "active")
            assert lease["memory_mb"] == 8192
            return number * factor, visible(), visible_to_child()

        assert train.__doc__ == "Train."
        for _ in range(2):
            result, here, there = train(3, factor=2)
            assert (result, there) == (6, here)
            assert here in {"0", "1", "2", "3"}
            assert visible() is None
            assert active(server) == set()

    def test_a_call_inside_a_call_uses_the_same_gpu(self, server: ServerProcess) -> None:
        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def inner() -> str | None:
            return visible()

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def outer() -> tuple[str | None, str | None, str | None]:
            return visible(), inner(), visible()

        assert len(set(outer())) == 1

    def test_where_it_is_too_late_it_says_so(self, server: ServerProcess, tmp_path: Path) -> None:
        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def train() -> None: ...

        # As CUDA has it open once it is initialized.
        with (
            (tmp_path / "nvidia-uvm").open("w"),
            pytest.warns(RuntimeWarning, match="CUDA was initialized in this process"),
        ):
            train()

    def test_a_process_that_initialized_cuda_on_a_lease_gets_the_same_gpu_again(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        opened: list[IO[str]] = []

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def train() -> str | None:
            if not opened:
                opened.append((tmp_path / "nvidia-uvm").open("w"))
            return visible()

        first = train()
        others = [take(server, among=[str(number)]) for number in range(4) if str(number) != first]
        release(server, others[0]["id"])  # it is free, and of no use to this process
        assert [train() for _ in range(3)] == [first] * 3
        opened[0].close()

    def test_two_threads_cannot_have_one_environment(self, server: ServerProcess) -> None:
        inside, go_on = threading.Event(), threading.Event()

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def train() -> None:
            inside.set()
            go_on.wait(30)

        thread = threading.Thread(target=train)
        thread.start()
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match=r"another thread or asyncio task .* use GPUExecutor"):
            train()
        go_on.set()
        thread.join()

    def test_what_goes_on_after_its_call_is_refused(self) -> None:
        def bit_by_bit() -> Iterator[int]:
            yield 1

        async def both() -> AsyncIterator[int]:
            yield 1

        class Thing: ...

        for function, said in {
            bit_by_bit: "bit_by_bit is a generator function",
            both: "both is an async generator function",
            Thing: "Thing is a class",
        }.items():
            for decorate in (gpu_worker_pool.gpu, gpu_worker_pool.gpu()):
                with pytest.raises(TypeError, match=said):
                    decorate(function)

    def test_it_needs_no_parentheses(self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_SERVICE_ENDPOINT", server.url)

        @gpu_worker_pool.gpu
        def train(number: int) -> tuple[int, str | None]:
            """Train."""
            return number, visible()

        assert train.__doc__ == "Train."
        number, gpu = train(3)
        assert (number, gpu in {"0", "1", "2", "3"}) == (3, True)
        assert (visible(), active(server)) == (None, set())

    def test_a_coroutine_function_has_a_gpu_until_it_has_ended(
        self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GPU_SERVICE_ENDPOINT", server.url)

        @gpu_worker_pool.gpu
        async def train(number: int) -> tuple[int, str | None, int]:
            await asyncio.sleep(0)
            return number, visible(), len(active(server))

        @gpu_worker_pool.gpu
        async def outer() -> list[str | None]:
            return [visible(), (await train(1))[1], plain(), visible()]

        @gpu_worker_pool.gpu
        def plain() -> str | None:
            return visible()

        @gpu_worker_pool.gpu
        def around() -> list[str | None]:
            return [visible(), *asyncio.run(outer())]

        number, gpu, held = asyncio.run(train(3))
        assert (number, gpu in {"0", "1", "2", "3"}, held) == (3, True, 1)
        assert (visible(), active(server)) == (None, set())
        assert len(set(asyncio.run(outer()))) == 1
        assert len(set(around())) == 1
        assert (visible(), active(server)) == (None, set())

    def test_two_tasks_cannot_have_one_environment(self, server: ServerProcess) -> None:
        @gpu_worker_pool.gpu(service_endpoint=server.url)
        async def train() -> str:
            await asyncio.sleep(0)
            return "done"

        async def both() -> tuple[str | BaseException, str | BaseException]:
            return await asyncio.gather(train(), train(), return_exceptions=True)

        first, second = asyncio.run(both())
        assert first == "done"
        assert isinstance(second, RuntimeError)
        assert active(server) == set()

    def test_a_cancelled_coroutine_leaves_nothing(self, server: ServerProcess) -> None:
        begun = asyncio.Event()

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        async def train() -> None:
            begun.set()
            await asyncio.Event().wait()

        async def cancel() -> None:
            task = asyncio.ensure_future(train())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert (visible(), active(server)) == (None, set())

    def test_what_is_neither_a_function_nor_a_time_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"timeout is <classmethod.*it must be a number of seconds"):
            gpu_worker_pool.gpu(classmethod(visible))  # type: ignore[arg-type, call-overload]
        with pytest.raises(TypeError, match="5 is not a function"):
            gpu_worker_pool.gpu()(5)  # type: ignore[arg-type]


def seen_by_pool_worker(_: int) -> tuple[int, str | None]:
    return os.getpid(), visible()


class TestPoolsOfProcesses:
    def test_every_worker_of_a_pool_has_a_gpu_until_it_ends(self, server: ServerProcess) -> None:
        initializer = partial(lease_for_process, service_endpoint=server.url)
        with multiprocessing.get_context("spawn").Pool(2, initializer) as pool:
            seen = dict(pool.map(seen_by_pool_worker, range(20), chunksize=1))
            eventually(lambda: len(active(server)) == 2, "both have one")  # one may do all tasks before the other is up
        assert len(set(seen.values())) == len(seen)
        eventually(lambda: active(server) == set(), "the leases have ended with the processes")

    def test_it_is_one_lease_however_often_it_is_asked_for(self, server: ServerProcess) -> None:
        first = lease_for_process(service_endpoint=server.url)
        assert visible() == first.env[VISIBLE]
        assert lease_for_process(service_endpoint=server.url) is first
        with pytest.raises(ValueError, match=r"this process has a lease for .* already"):
            lease_for_process(gpus=2, service_endpoint=server.url)
        release_for_process()
        release_for_process()
        assert (visible(), active(server)) == (None, set())

    def test_a_process_that_loses_its_lease_ends(self, server: ServerProcess) -> None:
        program = "print(gpu_worker_pool.lease_for_process(service_endpoint=url).lease_id); signal.pause()"
        with Child(server, program) as child:
            release(server, child.hear())
            code, _, err = child.end()
        assert code == -15
        assert "lost GPU" in err


class TestVisibleDevicesOfTheProgram:
    """CUDA_VISIBLE_DEVICES, as the user has set it for the program."""

    def test_only_these_gpus_are_requested(self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def train() -> str | None:
            return visible()

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def outer() -> tuple[str | None, str | None]:
            return visible(), train()

        for number in ("3", "1"):
            monkeypatch.setenv(VISIBLE, number)
            assert lease_for_process(service_endpoint=server.url).env[VISIBLE] == number
            assert outer() == (number, number)
            release_for_process()
            assert train() == number
            assert visible() == number
            monkeypatch.delenv(VISIBLE)

    def test_inside_a_lease_some_of_its_gpus_can_be_chosen(
        self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @gpu_worker_pool.gpu(gpus=2, service_endpoint=server.url)
        def outer() -> None:
            for number in str(visible()).split(","):
                with monkeypatch.context() as patch:
                    patch.setenv(VISIBLE, number)
                    assert inner() == number

        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def inner() -> str | None:
            return visible()

        outer()

    @pytest.mark.parametrize("value", ["", "-1", "none"])
    def test_a_value_that_names_no_gpu_is_refused(
        self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        @gpu_worker_pool.gpu(service_endpoint=server.url)
        def train() -> None: ...

        with monkeypatch.context() as patch:
            patch.setenv(VISIBLE, value)
            for ask in (train, partial(lease_for_process, service_endpoint=server.url)):
                with pytest.raises(RequestRefusedError, match=f"{VISIBLE}='{value}' names no GPU; unset it"):
                    ask()
            assert visible() == value
        assert active(server) == set()


@pytest.mark.parametrize(
    ("function", "asked", "message"),
    [
        (gpu, {"gpu": 1}, "gpu() does not know 'gpu'; did you mean gpus?"),
        (
            gpu,
            {"service_endpiont": "http://box"},
            "gpu() does not know 'service_endpiont'; did you mean service_endpoint?",
        ),
        (lease_for_process, {"gpu": 1}, "lease_for_process() does not know 'gpu'; did you mean gpus?"),
    ],
)
def test_an_unknown_option_names_the_function_that_was_called(
    function: Callable[..., object], asked: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        function(**asked)
