"""What a caller is told that sends more than the server can take from one caller."""

from __future__ import annotations

import json

from gpu_worker_pool.ledger.driver import TooManyCalls
from gpu_worker_pool.server.http.problems import problem_of


def test_a_caller_with_too_many_calls_is_told_to_come_again() -> None:
    answer = problem_of(TooManyCalls("1000 calls of this caller wait"))
    assert isinstance(answer.body, bytes)
    assert answer.status == 429
    assert "1000 calls of this caller" in json.loads(answer.body)["detail"]
    assert (b"retry-after", b"1") in answer.headers
