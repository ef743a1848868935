"""The statistics calls of a server with simulated GPUs, as a client sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.pool_view import STATES
from gpu_worker_pool.testing import ServerProcess
from tests.server.running import ROOT
from tests.server.shapes import misfits

SEED = ROOT.parent / "shared" / "seeds" / "SERVER.md"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2xA100-80GB,2xT4", "MAX_HISTORY": "5"}) as running:
        yield running


def seed_examples() -> list[tuple[str, Any]]:
    """The JSON examples under the numbered headings of the user's document, with the path each stands for."""
    if not SEED.exists():
        return []
    text = SEED.read_text(encoding="utf-8")
    found = re.findall(r"^#### \d\. .*?\(`(/[^`]*)`\).*?```json\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    return [(path, json.loads(example)) for path, example in found]


@pytest.mark.skipif(not SEED.exists(), reason="the user's own document is not beside this repository")
def test_every_example_of_the_users_document_is_held_against_the_server(server: ServerProcess) -> None:
    examples = seed_examples()
    assert len(examples) == 6

    wrong = {path: misfits(example, server.json(path)) for path, example in examples}

    assert wrong == {path: [] for path, _ in examples}


def test_simulated_gpus_cannot_be_taken_for_hardware(server: ServerProcess) -> None:
    assert server.json("/gpu/stats")["source"] == "simulated"
    assert all(gpu["name"].startswith("Simulated ") for gpu in server.json("/gpu/stats")["gpus"])
    assert all(gpu["name"].startswith("Simulated ") for gpu in server.json("/gpu/summary")["gpus_summary"])
    for path in ("/", "/gpu/count", "/gpu/summary", "/gpu/history", "/health", "/livez", "/readyz"):
        assert server.json(path)["source"] == "simulated", path
    assert server.json("/config")["monitoring"]["source"] == "simulated"
    assert "SIMULATED" in server.log()
    assert b'source="simulated"' in server.ask("/metrics").body


def test_the_summary_adds_up(server: ServerProcess) -> None:
    summary = server.json("/gpu/summary")

    assert summary["gpu_count"] == len(summary["gpus_summary"]) == 4
    assert summary["total_memory_mb"] == 2 * 81920 + 2 * 15360
    percent = 100 * summary["total_used_memory_mb"] / summary["total_memory_mb"]
    assert summary["total_memory_usage_percent"] == pytest.approx(percent, abs=0.1)


def test_the_history_is_a_ring(server: ServerProcess) -> None:
    history = server.json("/gpu/history")

    assert history["max_history"] == 5
    assert [gpu["gpu_id"] for gpu in history["gpus"]] == [0, 1, 2, 3]
    assert all(1 <= len(gpu["readings"]) <= 5 for gpu in history["gpus"])
    stamps = [reading["timestamp"] for reading in history["gpus"][0]["readings"]]
    assert stamps == sorted(stamps)


def test_metrics_are_in_base_units(server: ServerProcess) -> None:
    answer = server.ask("/metrics")
    text = answer.body.decode()

    assert answer.headers["content-type"].startswith("text/plain")
    total = re.search(r'^gpupool_gpu_memory_total_bytes\{.*gpu="0".*\} (\S+)$', text, re.MULTILINE)
    assert total is not None
    assert float(total[1]) == 81920 * 1024 * 1024
    ratio = re.search(r'^gpupool_gpu_utilization_ratio\{.*gpu="0".*\} (\S+)$', text, re.MULTILINE)
    assert ratio is not None
    assert 0 <= float(ratio[1]) <= 1
    assert "DCGM_FI" not in text


async def test_metrics_of_many_gpus_are_made_in_turns(tmp_path: Path) -> None:
    """A thousand GPUs have 17,000 lines: made at once, they would keep all callers waiting."""
    settings = ServerSettings(
        simulated_gpus="512", gpu_pool_state_dir=str(tmp_path), gpu_pool_socket="", _env_file=None
    )
    app = create_app(settings)
    async with app.running():
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        text = (await app.statistics.metrics.text(LoopShare(clock=partial(next, count())))).decode()
        counting.cancel()
    assert turns > 2 * 512, "each GPU is due, by a clock that goes on by a second at each look"
    families = [name for name, *_ in map(str.split, re.findall(r"^# TYPE (.*)$", text, re.MULTILINE))]
    assert len(families) == len(set(families)), "the samples of a metric are together"
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(parsed["gpupool_gpu_state"].samples) == 512 * len(STATES)
    assert sum(sample.value for sample in parsed["gpupool_gpu_state"].samples) == 512


def test_the_documentation_pages_ask_nobody_else(server: ServerProcess) -> None:
    for path, script in (("/docs", "swagger-ui-bundle.js"), ("/redoc", "redoc.standalone.js")):
        page = server.ask(path)
        assert page.status == 200
        links = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.body.decode())
        assert any(link.endswith(script) for link in links)
        for link in links:
            assert link.startswith("/"), link
            assert server.ask(link).status == 200


def test_the_home_page_lists_only_what_is_there(server: ServerProcess) -> None:
    described = server.json("/openapi.json")["paths"]
    for path, text in server.json("/")["endpoints"].items():
        if "{" in path or text.startswith("POST"):
            assert re.sub(r"{(\w+)}", "{}", path) in {re.sub(r"{(\w+)}", "{}", known) for known in described}, path
        elif path == "/events":
            assert server.ask(path, "HEAD").status == 200
        else:
            assert server.ask(path).status == 200, path
