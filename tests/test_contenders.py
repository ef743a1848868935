"""The comparison with what people would use instead still runs, and its judge is no friend of anybody."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def row(asked: float, granted: float, gpu: int = 0, **more: object) -> dict[str, object]:
    return {"asked": asked, "granted": granted, "gpu": gpu, "twice": False, **more}


def test_a_quick_run_measures_us_and_says_who_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "contenders.json"
    command = [sys.executable, str(BENCHMARKS / "contenders.py"), "--quick", "--json", str(file)]

    subprocess.run([*command, "--only", "ours, full", "--only", "filelock"], check=True, timeout=100, cwd=tmp_path)

    found = json.loads(file.read_text(encoding="utf-8"))
    crowd = next(table for table in found["tables"] if "GPUs held twice" in table["columns"])
    ours = dict(zip(crowd["columns"], next(row for row in crowd["rows"] if row[0] == "ours, full"), strict=True))
    assert ours["grants"] >= 16
    assert ours["GPUs held twice"] == 0
    assert not [skipped for skipped in found["skipped"] if skipped["what"].startswith("ours")]
    measured = [row[0] for table in found["tables"] for row in table["rows"]]
    assert "filelock" in measured or "filelock" in [skipped["what"] for skipped in found["skipped"]]
    assert measured.count("ours, full") == 6
    assert {plot["id"] for plot in found["plots"]} == {"hand-over", "reclaim", "rate"}


def test_who_asked_later_and_ran_earlier_has_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = module(monkeypatch, "contenders_order").judge
    fair = [row(number, number + 10) for number in range(20)]

    verdict = judge([*fair, row(2.5, 25.0)])

    assert (verdict.overtaken, verdict.most_places) == (1, 12)
    assert judge(fair).overtaken == 0


def test_what_came_at_about_the_same_time_has_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = module(monkeypatch, "contenders_order")
    near = order.MARGIN_S / 2

    assert order.judge([row(1.0, 9.0), row(1.0 + near, 5.0)]).overtaken == 0
    assert order.judge([row(1.0, 9.0), row(3.0, 9.0 - near)]).overtaken == 0
    assert order.judge([row(1.0, 9.0), row(3.0, 5.0)]).overtaken == 1


def test_the_gpu_of_a_dead_holder_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = module(monkeypatch, "contenders_order").judge
    death = row(1.0, 2.0, gpu=3, victim=123, killed=4.0)

    assert judge([death, row(1.0, 4.5, gpu=3), row(1.0, 6.0, gpu=3)]).reused_s == 0.5
    lost = judge([death, row(1.0, 3.0, gpu=3), row(1.0, 9.0, gpu=2)])
    assert lost.reused_s is None
    assert lost.watched_s == 5.0


def test_the_witness_can_testify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_locked = module(monkeypatch, "contenders_worker").is_locked
    file = tmp_path / "0.witness"

    with file.open("w") as one, file.open("w") as other:
        assert is_locked(one.fileno())
        assert not is_locked(other.fileno())


def test_a_program_that_is_not_there_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = module(monkeypatch, "peers")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(
        peers.MissingError, match="redis-server is not on the PATH: on Debian, apt-get install redis-server"
    ):
        peers.program("redis-server")
