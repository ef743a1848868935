"""What the page shows of GPUs in use outside the pool or by another server, of GPUs that cannot be read, and of a driver that hangs."""

from __future__ import annotations

import os
import pwd
import re
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest
from playwright.sync_api import Browser, expect
from pytest_playwright.pytest_playwright import CreateContextCallback

from gpu_worker_pool.host.gpu_lock import SCOPE_VARIABLE, GpuLocks
from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi, install
from tests.page.conftest import OpenPage
from tests.page.parts import connection, in_full, row

GPUS = (
    "0, GPU-used, NVIDIA A100, 81920, 70000, 97, 71, 361.50, 400.00\n"
    "1, GPU-odd, Odd GPU, [N/A], [Not Supported], , [N/A], [N/A], nonsense\n"
    "2, GPU-outside, NVIDIA A100, 81920, 30000, 5, 41, 61.50, 400.00\n"
    "3, GPU-elsewhere, NVIDIA A100, 81920, 0, 0, 41, 61.50, 400.00\n"
)
# A process that is really there, this one; no lease is for it.
PROCESSES = f"GPU-used, {os.getpid()}, 69000, /usr/bin/train\nGPU-outside, {os.getpid()}, 29696, /usr/bin/train\n"
OTHER_SERVER = "http://localhost:8123"


@pytest.fixture(scope="module")
def smi(tmp_path_factory: pytest.TempPathFactory) -> FakeNvidiaSmi:
    """It stands where the driver would be."""
    smi = install(tmp_path_factory.mktemp("smi"))
    smi.say(GPUS, PROCESSES)
    return smi


@pytest.fixture(scope="module")
def server(browser: Browser, smi: FakeNvidiaSmi) -> Iterator[ServerProcess]:
    scope = f"test-{secrets.token_hex(4)}"
    locks = GpuLocks(OTHER_SERVER, scope)
    assert locks.take("GPU-elsewhere") is None, "this process is the other server, as far as the lock tells"
    env = {**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", SCOPE_VARIABLE: scope}
    with closing(locks), ServerProcess(env) as server:
        yield server


def test_outside_use_and_what_is_unknown_are_shown_and_a_driver_that_hangs_is_told(
    open_page: OpenPage, smi: FakeNvidiaSmi
) -> None:
    page = open_page()
    expect(connection(page)).to_have_text("live")
    expect(page.get_by_text("simulated")).to_be_hidden()
    for shown in ("busy", "85 %", "97 %", "71 °C", "362 W", "outside the pool:", f"(pid {os.getpid()}), 67.4 GiB"):
        expect(in_full(page, 0)).to_contain_text(shown)
    expect(row(page, 1)).to_contain_text("unknown")
    expect(row(page, 1)).not_to_contain_text("0 %")  # unknown is not zero
    chips = page.get_by_role("group", name="Show only").get_by_role("button")
    expect(chips).to_have_text(["all 4", "blocked 3", "unknown 1"])  # they add up
    me, pid = pwd.getpwuid(os.getuid()).pw_name, os.getpid()
    why = rf"in use outside the pool: \S+ of {me} \(pid {pid}\), 29\.0\sGiB"
    line = rf"outside the pool: {me}, \S+ \(pid {pid}\), 29\.0\sGiB"
    expect(row(page, 2)).to_contain_text(re.compile(why))
    expect(in_full(page, 2)).to_contain_text(re.compile(line))
    attention = page.get_by_role("region", name="Needs attention")
    expect(attention).to_contain_text(re.compile(rf"GPU 2 is used outside the pool: {me}, \S+ \(pid {pid}\)"))
    elsewhere = f"another server on this machine has this GPU (user {me}, pid {pid}); use it at {OTHER_SERVER}"
    expect(row(page, 3)).to_contain_text("outside")
    expect(row(page, 3)).to_contain_text(elsewhere)

    smi.say({"hang": True})
    expect(attention).to_contain_text("The GPUs have not been measured since")
    expect(connection(page)).to_have_text("live")
    smi.say(GPUS, PROCESSES)


def test_without_a_driver_the_page_says_what_to_do(new_context: CreateContextCallback) -> None:
    with ServerProcess({"SIMULATED_GPUS": "", "LD_LIBRARY_PATH": "", "PATH": "/nowhere"}) as server:
        page = new_context().new_page()
        page.goto(f"{server.url}/ui")
        expect(page.get_by_text("There is no GPU here.")).to_be_visible()
        attention = page.get_by_role("region", name="Needs attention")
        expect(attention).to_contain_text("libnvidia-ml.so.1 was not found: install the NVIDIA driver")
        expect(page.get_by_text("all can be used")).to_be_hidden()
        expect(page.get_by_role("button", name="Get a GPU")).to_be_hidden()
