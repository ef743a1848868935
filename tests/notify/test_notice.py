"""A notice as JSON and in words."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from gpu_worker_pool.notify.notice import Notice, NoticeGpu, Occasion
from tests.notify.notices import NOTICE


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_programs_read_one_line_of_json() -> None:
    line = NOTICE.as_json()

    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "schema": "gpu-pool/notice/1",
        "on": "lost",
        "at": "2023-11-14T22:13:20Z",
        "lease_id": "run-1",
        "owner": "ada",
        "gpus": [
            {"node": "gpu-1", "uuid": "GPU-aaaa", "index": 0},
            {"node": "gpu-1", "uuid": "GPU-bbbb", "index": 3},
        ],
        "node": None,
        "reason": "revoked",
        "by": "root",
        "why": "a $(course)",
        "ends_at": None,
        "labels": {"command": "train.py"},
        "job": None,
        "exit_code": None,
        "title": "ada's train.py lost GPU 0, 3 of gpu-1: revoked by root",
        "text": NOTICE.text(),
    }


ONE = NoticeGpu("gpu-1", "GPU-aaaa", 2)
of_job = partial(Notice, at=0.0, owner="ada", gpus=(ONE,), job="12", labels=(("command", "train.py"),))


@pytest.mark.parametrize(
    ("notice", "title"),
    [
        (of_job(Occasion.GRANTED), "ada's job 12 (train.py) has GPU 2 of gpu-1"),
        (of_job(Occasion.ENDED, exit_code=3), "ada's job 12 (train.py) ended with exit code 3"),
        (
            of_job(Occasion.ENDED, exit_code=0, reason="time_limit"),
            "ada's job 12 (train.py) ended with exit code 0: time limit",
        ),
        (
            Notice(Occasion.ENDED, 0.0, owner="ada", job="12", reason="failed", why="no GPU"),
            "ada's job 12 ended: failed",
        ),
        (Notice(Occasion.ENDED, 0.0, "run-1"), "The lease run-1 of an unknown owner ended"),
        (of_job(Occasion.IDLE), "ada's job 12 (train.py) computes nothing on GPU 2 of gpu-1"),
        (
            of_job(Occasion.PREEMPTED, ends_at=1.7e9),
            "ada's job 12 (train.py) must end at 2023-11-14 22:13 UTC: another request needs GPU 2 of gpu-1",
        ),
        (
            of_job(Occasion.TIME_LIMIT, ends_at=1.7e9),
            "ada's job 12 (train.py) must end at 2023-11-14 22:13 UTC: its time limit",
        ),
        (
            Notice(Occasion.NODE_UNKNOWN, 0.0, node="gpu-1", why="its GPUs have not been read lately"),
            "Nothing is known of node gpu-1: its GPUs have not been read lately",
        ),
        (
            replace(NOTICE, gpus=(ONE, NoticeGpu("gpu-2", "GPU-cccc")), reason=None, by=None),
            "ada's train.py lost GPU 2 of gpu-1 and GPU GPU-cccc of gpu-2: a $(course)",
        ),
        (replace(NOTICE, labels=(("command", "a\nb\x1b"),), gpus=()), "ada's a b  lost its GPUs: revoked by root"),
    ],
)
def test_the_title_is_a_sentence(notice: Notice, title: str) -> None:
    assert notice.title() == title
