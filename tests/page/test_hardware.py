"""What the page shows of GPUs that somebody uses without the pool, that cannot be read, and of a driver that hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi, install
from tests.page.conftest import OpenPage
from tests.page.parts import card, connection

GPUS = (
    "0, GPU-used, NVIDIA A100, 81920, 70000, 97, 71, 361.50, 400.00\n"
    "1, GPU-odd, Odd GPU, [N/A], [Not Supported], , [N/A], [N/A], nonsense\n"
)
# A process that is really there, this one; nobody has a lease for it.
PROCESSES = f"GPU-used, {os.getpid()}, 69000, /usr/bin/somebody\n"


@pytest.fixture(scope="module")
def smi(tmp_path_factory: pytest.TempPathFactory) -> FakeNvidiaSmi:
    """It stands where the driver would be."""
    smi = install(tmp_path_factory.mktemp("smi"))
    smi.say(GPUS, PROCESSES)
    return smi


@pytest.fixture(scope="module")
def server(browser: Browser, smi: FakeNvidiaSmi) -> Iterator[ServerProcess]:
    with ServerProcess({**smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}) as server:
        yield server


def test_outside_use_and_what_is_unknown_are_shown_and_a_driver_that_hangs_is_told(
    open_page: OpenPage, smi: FakeNvidiaSmi
) -> None:
    page = open_page()
    expect(connection(page)).to_have_text("live")
    expect(page.get_by_text("not hardware")).to_be_hidden()
    for shown in ("busy", "85 %", "97 %", "71 °C", "362 W", "outside the pool:", f"(pid {os.getpid()}), 67.4 GiB"):
        expect(card(page, 0)).to_contain_text(shown)
    expect(card(page, 1)).to_contain_text("unknown")
    expect(card(page, 1)).not_to_contain_text("0 %")  # unknown is not zero

    smi.say({"hang": True})
    expect(page.get_by_role("alert").first).to_contain_text("The GPUs have not been measured since")
    expect(connection(page)).to_have_text("live")
    smi.say(GPUS, PROCESSES)
