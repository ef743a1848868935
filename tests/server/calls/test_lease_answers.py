"""An answer that is filled into a frame is that of a lease which is encoded as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.server.calls.lease_answers import MOST_FRAMES, LeaseAnswers
from gpu_worker_pool.server.calls.lease_view import lease_view
from gpu_worker_pool.server.http.response import encode
from tests.core.build import Box, reading, request

# Labels that look like what the frames are cut at.
TRICKY = (("id", "null"), ("gpus", '"gpus":null'), ("env", "null"), ("ended_by", '{"ended_by":null}'))
ASKED = replace(request(worker="w", ttl_s=90.0), labels=TRICKY)


def active(answers: LeaseAnswers, box: Box, lease_id: str, *, by_uuid: bool = False) -> tuple[bytes, bytes]:
    """The answer, and the lease encoded as a whole."""
    lease = box.state.leases[lease_id]
    assert isinstance(lease, ActiveLease)
    plain = encode(lease_view(box.state, lease, box.now, by_uuid=by_uuid, pool_id="p", asked="box"))
    return answers.active(box.state, lease, box.now, by_uuid=by_uuid, pool_id="p", asked="box"), plain


def ended(answers: LeaseAnswers, box: Box, lease_id: str) -> tuple[bytes, bytes]:
    lease = box.state.find(lease_id)
    assert isinstance(lease, EndedLease)
    return answers.ended(box.state, lease, box.now), encode(lease_view(box.state, lease, box.now))


@pytest.mark.parametrize(
    "asked",
    [ASKED, replace(ASKED, time_limit_s=100.0), request(pid=7), request(gpus=2), request(memory_mb=500.0)],
    ids=["ttl", "limit", "process", "several", "share"],
)
def test_leases_of_one_request_are_answered_as_if_each_were_encoded(asked: Request) -> None:
    box, answers = Box(*map(reading, range(4)), idle_after_s=30.0), LeaseAnswers()

    for number, (by, why) in enumerate([(None, None), ("ada", None), ("root", 'it says "end_note":null')]):
        lease_id = f"lease-{number}"
        box.do(cmd.RequestLease(lease_id, asked))
        for waited_s in (0.0, 45.0):  # then one with a limit is warned, and one that computes nothing is idle
            box.pass_time(waited_s)
            box.observe_now(*map(reading, range(4)))
            for by_uuid in (False, True):
                answer, plain = active(answers, box, lease_id, by_uuid=by_uuid)
                assert answer == plain
        box.do(cmd.Release(lease_id, is_holder=by is None, by=by, why=why))
        answer, plain = ended(answers, box, lease_id)
        assert answer == plain
        box.observe_now(*map(reading, range(4)))


def test_a_process_is_not_taken_for_another_of_an_equal_request() -> None:
    box, answers = Box(*map(reading, range(2))), LeaseAnswers()

    box.do(cmd.RequestLease("watched", request(pid=7)))
    box.do(cmd.RequestLease("remote", replace(request(pid=7), holder=replace(request(pid=7).holder, process=None))))

    for lease_id in ("watched", "remote"):
        answer, plain = active(answers, box, lease_id)
        assert answer == plain


def test_few_frames_are_kept() -> None:
    box, answers = Box(reading(0)), LeaseAnswers()

    for number in range(MOST_FRAMES + 10):
        box.do(cmd.RequestLease(f"lease-{number}", request()))
        active(answers, box, f"lease-{number}")
        box.release(f"lease-{number}")
        box.observe_now(reading(0))

    assert repr(answers) == "<LeaseAnswers: 10 frames kept>"
