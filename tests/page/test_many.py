"""A large pool on one page, while it changes."""

from __future__ import annotations

import http.client
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.parts import connection
from tests.server.leasing import release, take
from tests.server.running import ask_over

GPUS, LEASES, WAITING = 200, 500, 30
TURNS = 4
HAS_TEXT = "(text) => document.getElementById('gpus').textContent.includes(text)"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """Three share each of the first 150 GPUs, and each of the last 50 has one holder."""
    env = {
        "SIMULATED_GPUS": str(GPUS),
        "REFRESH_INTERVAL": "1",
        "GPU_UTILIZATION_THRESHOLD_PERCENT": "100",
        "GPU_POOL_DURABILITY": "normal",
    }
    with ServerProcess(env) as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
            for number in range(LEASES + WAITING):
                gpu = number % 150 if number < 450 else number % 50 + 150
                form = {
                    "owner": f"owner{number % 40}",
                    "labels": {"command": f"worker{number}"},
                    "among": [gpu],
                    "ttl_s": 3600,
                }
                shared = {"memory_mb": 1000} if number < 450 else {}
                answer = ask_over(connection, f"/leases/many{number}", "PUT", None, form | shared)
                assert answer.status == (201 if number < LEASES else 202), answer
        yield server


def test_two_hundred_gpus_and_five_hundred_leases_are_shown_and_stay_smooth(
    page: Page, server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    expect(connection(page)).to_have_text("live")
    page.wait_for_function(HAS_TEXT, arg=f"worker{LEASES - 1}")
    # By tags: on a page this large, looking for roles takes the browser seconds.
    expect(page.locator("main h4")).to_have_count(GPUS)
    expect(page.locator("main strong")).to_have_count(LEASES + WAITING)

    page.evaluate(
        """() => {
            window.framesAt = []
            const frame = (at) => { window.framesAt.push(at); requestAnimationFrame(frame) }
            requestAnimationFrame(frame)
        }"""
    )
    for turn in range(TURNS):
        for gpu in range(turn, 150, 10):
            release(server, f"many{gpu}")
            take(server, owner=f"newcomer{gpu}", memory_mb=1000, among=[gpu], wait_s=10)
        page.mouse.wheel(0, 900)
        page.wait_for_function(HAS_TEXT, arg=f"newcomer{140 + turn}")
    frames_at: list[float] = page.evaluate("window.framesAt")

    newcomer = page.locator("main strong").get_by_text("newcomer140", exact=True)
    newcomer.scroll_into_view_if_needed()
    expect(newcomer).to_be_in_viewport()

    times = sorted(later - earlier for earlier, later in pairwise(frames_at))
    assert len(times) > 10
    median, p95 = statistics.median(times), times[int(len(times) * 0.95)]
    told = f"{len(times)} frames: median {median:.0f} ms, 95 % within {p95:.0f} ms, longest {times[-1]:.0f} ms"
    record_property("measured", f"the page with {GPUS} GPUs and {LEASES} leases, {told}")
