"""The GPUs of other servers on the same page, which here is not at the root of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import controls, queue_of, use_token
from tests.server.leasing import queue, take

ADMIN = "the-token-of-admin"
PREFIX = "/gpu/pool"


@pytest.fixture(scope="module")
def other(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2xT4", "GPU_POOL_NODE": "box2"}) as other:
        yield other


@pytest.fixture(scope="module")
def server(other: ServerProcess) -> Iterator[ServerProcess]:
    env = {
        "SIMULATED_GPUS": "1xA100-80GB",
        "GPU_POOL_NODE": "box1",
        "API_PREFIX": PREFIX,
        "GPU_POOL_PEERS": other.url,
        "GPU_POOL_TOKENS": f"admin:{ADMIN}",
    }
    with ServerProcess(env) as server:
        yield server


def test_a_peers_gpus_are_on_the_page_and_a_dead_peer_is_told(open_page: OpenPage, other: ServerProcess) -> None:
    page = open_page(f"{PREFIX}/ui")
    expect(page.get_by_role("heading", level=1)).to_have_text("box1")
    expect(page.get_by_role("heading", level=3)).to_have_text(["box1", "box2"])
    expect(page.get_by_role("heading", level=4)).to_have_text(
        ["GPU 0 Simulated NVIDIA A100-SXM4-80GB", "GPU 0 Simulated Tesla T4", "GPU 1 Simulated Tesla T4"]
    )
    expect(page.get_by_role("link", name="its own page")).to_have_attribute("href", f"{other.url}/ui")

    far = [take(other, owner=f"far{number}", ttl_s=3600) for number in range(2)]
    queue(other, owner="waits there", ttl_s=3600)
    for lease in far:
        expect(page.get_by_role("strong").get_by_text(lease["owner"])).to_be_visible()
    expect(queue_of(page).get_by_role("listitem").filter(has_text="waits there")).to_be_visible()
    # The token is this server's: nothing can be done on another one.
    use_token(page, ADMIN)
    expect(controls(page)).to_have_text(["Drain"])

    other.kill()
    expect(page.get_by_text(re.compile("no answer: cannot connect.*as it was"))).to_be_visible()
    expect(queue_of(page).get_by_text(re.compile("box2: no answer, as it was"))).to_be_visible()
    expect(page.get_by_role("strong").get_by_text("far0")).to_be_visible()
