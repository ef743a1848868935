"""A large pool on one page, while it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.parts import connection
from tests.page.test_grid import COUNT_LONG_TASKS
from tests.server.leasing import release, take

GPUS = 1000
TURNS = 4


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """All GPUs of its first half are held."""
    env = {"SIMULATED_GPUS": str(GPUS), "REFRESH_INTERVAL": "1", "GPU_POOL_DURABILITY": "normal"}
    with ServerProcess(env) as server:
        for number in range(5):
            among = list(range(number * 100, number * 100 + 100))
            take(server, f"many{number}", owner=f"owner{number}", gpus=100, among=among, ttl_s=3600)
        yield server


def test_a_thousand_gpus_are_shown_and_stay_smooth_while_they_change(
    page: Page, server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    expect(connection(page)).to_have_text("live")
    expect(page.get_by_role("button", name=f"all {GPUS}")).to_be_visible()
    page.evaluate(COUNT_LONG_TASKS)
    for turn in range(TURNS):
        release(server, f"many{turn}")
        take(server, owner=f"newcomer{turn}", among=[990 + turn], ttl_s=3600, labels={"command": "late.py"})
        page.mouse.wheel(0, 900)
        expect(page.get_by_role("button", name=f"leased {500 - 99 * (turn + 1)}")).to_be_visible()
        assert page.locator(".tile").count() < 700
    # What a tile does not show is asked for when it is opened.
    page.get_by_label("Find").fill("newcomer3")
    page.get_by_role("button", name=re.compile("GPU 993 of .*, newcomer3")).click()
    expect(page.locator("#details")).to_contain_text(re.compile("Temperature.*°C"))
    expect(page.locator("#details")).to_contain_text("leased by newcomer3 (late.py)")
    expect(page.locator("#details").get_by_role("strong")).to_have_text("newcomer3")

    elements, tasks = page.evaluate("document.querySelectorAll('*').length"), page.evaluate("window.longTasks")
    longest = max(tasks, default=0)
    told = f"{elements} elements, {len(tasks)} long tasks, longest {longest:.0f} ms"
    record_property("measured", f"the page with {GPUS} GPUs, {told}")
