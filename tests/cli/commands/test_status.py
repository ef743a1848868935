from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from gpu_worker_pool.cli.commands.status import STATE_STYLES, PoolsSeen, show
from gpu_worker_pool.cli.output import Console
from gpu_worker_pool.cli.pools.reading import ask_pools, read_pool
from gpu_worker_pool.cli.pools.report import Naming, PoolReport
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, environment, gpu_pool
from tests.cli.terminal import Terminal
from tests.client.statistics_server import StatisticsServer
from tests.server.leasing import queue, take
from tests.server.running import free_port

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Two of three GPUs are taken, and somebody waits."""
    with ServerProcess({"SIMULATED_GPUS": "2xA100-80GB,1xT4"}) as running:
        take(
            running, "train", owner="[red]bob[/red]", ttl_s=600, model="A100", labels={"command": "python [b]train.py"}
        )
        take(running, "share", owner="carol", worker_id="w7", ttl_s=600, memory_mb=1000, model="A100")
        queue(running, "wide", owner="dave", gpus=2, model="A100", ttl_s=600, priority=5)
        yield running


def test_every_gpu_its_holder_and_the_queue_are_shown_and_a_server_that_is_down_too(server: ServerProcess) -> None:
    port = free_port()
    done = gpu_pool("status", "--endpoint", f"{server.url},http://127.0.0.1:{port}")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == f"1 GPU is free now (1 at 127.0.0.1-{server.port})"
    assert lines[1].endswith(": 3 GPUs, 1 free, simulated")
    by_holder = {line.split("%")[2].split(",")[0].strip(): line for line in lines[3:6] if "ed " in line}
    # What looks like markup is a name like any other, and nothing of it is obeyed or swallowed.
    assert "[red]bob[/red]" in by_holder
    assert re.search(r"\[red\]bob\[/red\], python \[b\]train\.py, since \d\d:\d\d$", by_holder["[red]bob[/red]"])
    assert f"127.0.0.1-{server.port}:" in by_holder["carol"]
    assert "w7" not in done.out
    assert "2 leases, 1 waiting; --why says why" in lines
    assert next(line for line in lines if "dave" in line).split()[0] == "1"
    why = called("status", "--why", server=server).out.splitlines()
    waiting = next(line for line in why if "dave" in line)
    assert waiting.split()[0] == "1"
    assert "2 GPUs on one node of model A100, priority 5" in waiting
    # Without the position and the wishes, which stand before it.
    assert "Position" not in waiting
    assert waiting.endswith("1 Simulated Tesla T4, not A100")
    assert f"127.0.0.1-{port} http://127.0.0.1:{port}: down: " in done.out
    assert "\x1b" not in done.out
    assert all(line == line.rstrip() for line in lines)


def test_colours_are_for_terminals(server: ServerProcess) -> None:
    with Terminal([*GPU_POOL, "status"], environment(server), columns=140) as terminal:
        assert terminal.wait() == 0
    assert b"\x1b[32mfree" in terminal.all_output
    assert b"\x1b[34mleased" in terminal.all_output
    assert "[red]bob[/red]" in terminal.text


def test_a_colour_means_the_same_as_on_the_page() -> None:
    page = (files("gpu_worker_pool.server.ui") / "page/pool.js").read_text(encoding="utf-8")
    kinds = dict(re.findall(r'(\w+): "(\w+)"', page.partition("KIND_OF = {")[2].partition("}")[0]))
    styles = {"free": "green", "used": "blue", "kept": "blue", "blocked": "yellow", "broken": "bold red"}
    assert {state: styles.get(kind, "dim") for state, kind in kinds.items()} == STATE_STYLES


def test_json_is_what_the_server_answers_and_of_several_each_with_its_name(server: ServerProcess) -> None:
    one = called("status", "--json", server=server)
    assert one.code == 0, one.err
    assert one.json.keys() == server.json("/pool").keys()
    assert [gpu["uuid"] for gpu in one.json["gpus"]] == [gpu["uuid"] for gpu in server.json("/pool")["gpus"]]

    both = called("status", "--json", "-e", f"{server.url},http://127.0.0.1:{free_port()}").json
    there, away = both["endpoints"]
    assert there.keys() == {"endpoint", "url", "error", "same_as", *one.json}
    assert (there["error"], there["url"]) == (None, server.url)
    assert away.keys() == {"endpoint", "url", "error", "same_as"}
    assert away["error"]


def test_only_mine_is_shown(server: ServerProcess) -> None:
    """By the name that the server knows the caller by: with a token, that of the token."""
    mine = called("status", "--mine", "--json", server=server).json
    owners = {lease["owner"] for lease in (*mine["leases"], *mine["queue"])}
    assert owners <= {user_name()}
    everything = server.json("/pool")
    held = [lease["id"] for lease in everything["leases"] if lease["owner"] == user_name()]
    assert [lease["id"] for lease in mine["leases"]] == held
    assert len(mine["gpus"]) == sum(bool(set(held).intersection(gpu["leases"])) for gpu in everything["gpus"])


def test_where_no_server_answers_it_says_what_to_do() -> None:
    done = called("status", server=f"http://127.0.0.1:{free_port()}")
    assert (done.code, done.out) == (125, "")
    assert "gpu-pool serve" in done.err
    assert "--endpoint" in done.err


# --- without a process of its own ----------------------------------------------------------------------------------


def _shown(*reports: PoolReport, has_colours: bool = False) -> str:
    file = io.StringIO()
    show(
        Console(file=file, width=160, is_terminal=has_colours),
        PoolsSeen(reports),
        NOW,
    )
    return file.getvalue()


def _read(pool: Any) -> PoolReport:
    return read_pool(ServerAnswer("box", "http://box:8000", 200, pool), Naming("box"))


async def test_a_server_with_statistics_only_is_shown_from_them() -> None:
    gpus = [
        {"gpu_id": 0, "name": "NVIDIA A100", "memory_usage_percent": 1.0, "utilization_percent": 0},
        {"gpu_id": 1, "name": "NVIDIA A100", "memory_usage_percent": 97.0, "utilization_percent": 0},
        {"gpu_id": 2, "name": "NVIDIA A100", "memory_usage_percent": 1.0, "utilization_percent": None},
    ]
    async with StatisticsServer(gpus) as old, Servers([old.url]) as servers:
        (report,) = await ask_pools(servers)
    text = _shown(report)
    assert "This server has statistics only" in text
    assert [gpu.state for gpu in report.view.gpus] == ["free", "busy", "unknown"]
    assert "memory at 97 %, threshold 80 %" in text
    assert "its utilization is unknown" in text
    assert report.has_leases is False


async def test_one_server_under_two_names_is_counted_once(server: ServerProcess) -> None:
    async with Servers([server.url, f"http://localhost:{server.port}"]) as servers:
        first, second = await ask_pools(servers)
    assert (first.same_as, second.same_as) == (None, first.endpoint)
    assert f"the same server as {first.endpoint}" in _shown(first, second)
    of_fleet = replace(second, view=replace(second.view, node=None))
    assert f"a box of the same fleet as {first.endpoint}" in _shown(first, of_fleet)


def test_a_server_that_cannot_grant_says_so_in_red() -> None:
    text = _shown(_read({"gpus": [], "can_grant": False, "trouble": "the disk is [full]"}), has_colours=True)
    assert "\x1b[1;31mnothing can be granted: the disk is [full]" in text


@pytest.mark.parametrize("gpu", [{"gpu_id": 0, "state": "free"}, {"uuid": None}, "GPU-1", None])
def test_gpus_none_of_which_can_be_read_are_not_shown_as_none(gpu: Any) -> None:
    report = _read({"gpus": [gpu]})
    assert not report.is_up
    assert "it shows GPUs that cannot be read" in _shown(report)
    assert _read({"gpus": []}).is_up


def test_nothing_that_a_terminal_obeys_comes_through() -> None:
    evil = "\x1b]0;owned\x07\x9b31m\r\n\u202e[bold]"
    lease = {
        "id": "a",
        "state": "active",
        "owner": evil,
        "worker_id": evil,
        "labels": {"command": evil},
        "gpus": [{"uuid": evil}],
    }
    gpu = {"gpu_id": 0, "uuid": evil, "name": evil, "state": evil, "reason": evil, "leases": ["a"]}
    report = _read({"gpus": [gpu], "leases": [lease], "queue": [{**lease, "reason": evil}], "source": evil})
    text = _shown(report)
    assert "[bold]" in text
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert json.dumps(report.answer.data).isprintable()


def test_unknown_is_not_zero(server: ServerProcess) -> None:
    whole = server.json("/pool")
    for gpu in whole["gpus"]:
        gpu["memory_used_mb"] = gpu["utilization_percent"] = None
    assert _shown(_read(whole)).count("unknown") == 2 * len(whole["gpus"])
    assert _read({"nothing": "known"}).error is not None


def _crowded() -> Any:
    def lease(number: int, owner: str, command: str) -> dict[str, Any]:
        return {
            "id": f"lease-{number}",
            "state": "active",
            "owner": owner,
            "worker_id": f"worker-{number}-of-a-long-name",
            "labels": {"command": command},
            "granted_at": "2027-01-15T07:30:00Z",
            "expires_in_s": 23.0,
        }

    process = {"pid": 4711, "name": "python", "used_mb": 59_392, "is_outside": True}
    small = {"pid": 12, "name": "Xorg", "used_mb": 20, "is_outside": True}
    return {
        "gpus": [
            {
                "uuid": "GPU-0",
                "gpu_id": 0,
                "name": "NVIDIA A100-SXM4-80GB",
                "state": "shared",
                "leases": ["lease-1", "lease-2"],
                "memory_total_mb": 81_920,
                "memory_used_mb": 8_192,
                "utilization_percent": 3,
                "processes": [small],
            },
            {"uuid": "GPU-1", "gpu_id": 1, "name": "NVIDIA A100-SXM4-80GB", "state": "free", "processes": [process]},
        ],
        "leases": [lease(1, "carol", "train_the_large_model.py"), lease(2, "dave", "eval.py")],
    }


def test_at_80_columns_each_holder_stands_beside_what_it_runs() -> None:
    file = io.StringIO()
    show(Console(file=file, width=80, is_terminal=True, has_colours=False), PoolsSeen([_read(_crowded())]), NOW)
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    at = lines[1].index("HELD BY")
    told = " ".join(line[at:].strip() for line in lines[2:])
    assert "carol, train_the_large_model.py, since " in told
    assert told.index("carol") < told.index("train_the") < told.index("dave") < told.index("eval.py")
    assert "worker-" not in file.getvalue()


def test_what_is_outside_the_pool_is_named_where_it_holds_much() -> None:
    lines = _shown(_read(_crowded())).splitlines()
    assert any(line.endswith("outside the pool: python, pid 4711, 58.0 GiB") for line in lines)
    assert not any("Xorg" in line for line in lines)


def test_eight_gpus_and_ten_waiters_fit_a_screen() -> None:
    with ServerProcess({"SIMULATED_GPUS": "8xA100-80GB"}) as full:
        for number in range(8):
            take(
                full, owner=f"owner-{number}", time_limit_s=7200, labels={"command": "python train_the_large_model.py"}
            )
        for number in range(10):
            queue(
                full, owner=f"waiter-{number}", gpus=1 + number % 4, labels={"command": "python fine_tune_it_again.py"}
            )
        with Terminal([*GPU_POOL, "status"], environment(full), columns=80, rows=60) as terminal:
            assert terminal.wait() == 0
    lines = terminal.text.splitlines()
    assert len(lines) <= 40, terminal.text
    waiting = [line for line in lines if "waiter-" in line]
    assert [line.split()[0] for line in waiting] == [str(number) for number in range(1, 11)]
    assert all(re.search(r"\d\d:\d\d  (-|~?(\w{3} )?\d\d:\d\d)$", line) for line in waiting), terminal.text


@pytest.mark.parametrize("command", [("status", "--watch"), ("top",)])
def test_it_is_drawn_again_until_q(server: ServerProcess, command: tuple[str, ...]) -> None:
    env = environment(server)
    with Terminal([*GPU_POOL, *command], env, columns=100, rows=12) as terminal:
        first = terminal.wait_for("GPUs, ")
        assert "q quits" in first
        drawn = terminal.all_output.count(b"\x1b[H")
        while terminal.all_output.count(b"\x1b[H") < drawn + 3:
            terminal.wait_for("GPUs, ")
            terminal._read(time.monotonic() + 30)
        terminal.type("q")
        assert terminal.wait() == 0
