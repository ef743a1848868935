"""Messages between boxes: an exact round trip, and tolerance for the next version. The key is proven and never shown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from gpu_worker_pool.core.fleet import messages as msg
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.server.agent import frames
from gpu_worker_pool.server.agent.frames import decode_kept, decode_message, encode_kept, encode_message
from gpu_worker_pool.server.agent.handshake import FleetKey, ForgedFrame, Hello, Proof

HOLDER = Holder("worker", "ada", process=ProcessId(7, 1.5), node="box")
KEPT = msg.KeptLease("a", 3, Request(Wishes(memory_mb=8000), HOLDER), ("GPU-1",), None, True, 1.0, 2.0)
READING = Reading(
    Gpu(GpuKey("box", "GPU-1"), 0, "A100", 3), 5.0, 80000, 10.5, processes=(GpuProcess(ProcessId(7), ancestors=()),)
)
ONE, TWO, THREE = ("1" * 64, "2" * 64, "3" * 64)
OVER = msg.LeaseOver("a", None, EndReason.EXPIRED)
MESSAGES: list[Any] = [
    msg.Announce(
        "box",
        "m",
        "b",
        "http://box",
        "1",
        True,
        2,
        3,
        (InventoryGpu("GPU-1", 0, "A100", None),),
        (KEPT,),
        (OVER,),
    ),
    msg.Report(4.0, (READING,)),
    msg.Report(4.0),
    msg.Report(4.0, gone=("GPU-2",)),
    msg.CannotKeep("the disk is full"),
    msg.GrantKept("a", 3),
    OVER,
    msg.HolderIsDead("a"),
    msg.Welcome(1, 2.0, "pool", (KEPT,), (msg.WatchOrder("b", ProcessId(8, None)),), (("box", "http://box"),)),
    msg.Orders(1, 2.0),
    msg.Orders(1, 2.0, (KEPT,), ("b",), warnings=(msg.ComingEnd("a", EndReason.PREEMPTED, 60.0),), look=True),
    msg.Rejected("another machine has this name"),
    Hello("box", ONE, "1"),
    Proof(ONE),
    frames.Leads("http://leader"),
    frames.Ask(1, "PUT", "/leases/a?wait_s=5", (("accept", "*/*"),), "{}"),
    frames.Begun(1, 201, (("etag", "x"),), is_whole=True, keeper="box"),
    frames.BodyPart(1, is_last=True),
    frames.GivenUp(1),
]


def test_every_kind_of_message_is_covered_here() -> None:
    assert {type(message) for message in MESSAGES} == {
        *get_args(msg.AgentMessage),
        *get_args(msg.LeaderMessage),
        *get_args(frames.HandshakeFrame),
        frames.Leads,
        *get_args(frames.CallFrame),
    }


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    assert decode_message(encode_message(message), type(message)) == message


def test_what_a_newer_version_adds_is_left_out() -> None:
    text = json.loads(encode_message(MESSAGES[0]))
    text["leases"][0]["colour"] = text["colour"] = "red"
    assert decode_message(json.dumps(text), msg.AgentMessage) == MESSAGES[0]
    assert decode_message('{"kind": "Later", "x": 1}', msg.AgentMessage) is None


def test_a_sign_that_nothing_happened_is_short() -> None:
    assert encode_message(msg.Orders(1, 2.0)) == '{"kind":"Orders","epoch":1,"time":2.0}'
    assert encode_message(msg.Report(4.0)) == '{"kind":"Report","heard":4.0}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"kind": "Welcome"}', "is not expected here"),
        ('{"kind": "GrantKept", "lease_id": 7, "fence": 1}', "GrantKept.lease_id is 7, not of type str"),
        ('{"kind": "GrantKept"}', "has the wrong fields: .*missing 2 required"),
    ],
)
def test_what_is_not_a_message_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_message(text, msg.AgentMessage)


def test_what_a_box_keeps_comes_back_from_its_disk() -> None:
    assert decode_kept(msg.KeptLease, encode_kept(KEPT)) == KEPT
    assert decode_kept(msg.KeptLease, encode_kept(KEPT)).request.holder.process == ProcessId(7, 1.5)
    assert decode_kept(msg.LeaseOver, encode_kept(OVER)) == OVER


HELLO, CHALLENGE = Hello("box", ONE, "1"), Hello("leader", TWO, "1")
KEY = FleetKey("a-key-that-is-long-enough")


def test_a_proof_is_for_one_key_role_node_and_pair_of_nonces() -> None:
    key = KEY
    proof = key.prove("agent", HELLO, CHALLENGE)
    assert key.is_proven(proof, "agent", HELLO, CHALLENGE)
    assert not FleetKey("another-key-of-a-stranger").is_proven(proof, "agent", HELLO, CHALLENGE)
    assert not key.is_proven(proof, "leader", HELLO, CHALLENGE)
    for hello, challenge in (
        (replace(HELLO, node="other"), CHALLENGE),
        (replace(HELLO, nonce=THREE), CHALLENGE),
        (HELLO, replace(CHALLENGE, nonce=THREE)),
    ):
        assert not key.is_proven(proof, "agent", hello, challenge)


def test_a_frame_opens_once_in_its_place_and_direction_and_with_the_nonces_of_its_link() -> None:
    agent, leader = KEY.seal("agent", HELLO, CHALLENGE), KEY.seal("leader", HELLO, CHALLENGE)
    first, second = agent.seal(b"one"), agent.seal(b"two")
    others = [
        KEY.seal("agent", replace(HELLO, nonce=THREE), CHALLENGE),
        KEY.seal("agent", HELLO, replace(CHALLENGE, node="other")),
        FleetKey("another-key-of-a-stranger").seal("agent", HELLO, CHALLENGE),
        leader,
    ]
    for forged in (second, first[:-1] + b"x", b"", *(other.seal(b"one") for other in others)):
        with pytest.raises(ForgedFrame):
            leader.open(forged)
    assert leader.open(first) == b"one"
    with pytest.raises(ForgedFrame):
        leader.open(first)
    assert leader.open(second) == b"two"


@pytest.mark.parametrize("node", ["", "box\nERROR forged", "box\u2028", "\ud800", "x" * 256])
def test_a_name_that_would_forge_lines_of_a_log_is_refused(node: str) -> None:
    text = json.dumps({"kind": "Hello", "node": node, "nonce": ONE, "version": "1"})
    with pytest.raises(ValueError, match="printable characters"):
        decode_message(text, Hello)


def test_a_proof_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        decode_message('{"kind": "Proof", "proof": "\\ud800"}', Proof)


def test_a_key_does_not_show_itself() -> None:
    assert repr(FleetKey("a-key-that-is-long-enough")) == "<FleetKey>"
