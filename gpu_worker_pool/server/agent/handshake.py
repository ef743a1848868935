"""How two boxes of a fleet prove to each other that they know its key, and how they seal what they say from then on.

Each makes a nonce; a proof is an HMAC over both of them, the role, and both nodes. The box that connects proves itself first:
a caller from anywhere learns nothing that it could try keys on. The key of the link is derived from the same and is never
sent, so a program that relays the handshake can pass frames on or stop them, and can neither make nor repeat one. What is
sent is not encrypted: boxes need TLS between them, or a network that they trust.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

LEAST_CHARACTERS = 16
_NONCE_BYTES = 32
_HEX = re.compile(r"[0-9a-f]{64}")
_MOST_NAME = 255
_MAC_BYTES = 16
OTHER_KEY = "have different fleet keys; set GPU_POOL_FLEET_KEY to the same secret on all boxes of the fleet"
VERSION: str = import_module("gpu_worker_pool").__version__

# The agent is the box that connects; the leader is the one that it connects to, whether that leads or not.
Role = Literal["agent", "leader"]


@dataclass(frozen=True, slots=True)
class Hello:
    """From the agent, and then from the leader: it is this node."""

    node: str
    nonce: str
    version: str

    def __post_init__(self) -> None:
        _check_node(self.node)
        _check_hex(self.nonce)


@dataclass(frozen=True, slots=True)
class Proof:
    """From both."""

    proof: str

    def __post_init__(self) -> None:
        _check_hex(self.proof)


def _check_node(node: str) -> None:
    """A ValueError for a name that no box has, and that would forge lines of a log."""
    if not 0 < len(node) <= _MOST_NAME or not node.isprintable():
        raise ValueError(f"a node has a name of 1 to {_MOST_NAME} printable characters")


def _check_hex(text: str) -> None:
    if not _HEX.fullmatch(text):
        raise ValueError("a nonce or a proof is 64 hexadecimal digits")


class ForgedFrame(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """A frame was not made by the other end of this link, or was made for another place in it."""


class Seal:
    """Seals the frames of one end of a link, and opens those of the other. Both count: a frame that is repeated, left out or
    moved does not open.
    """

    def __init__(self, key: bytes, role: Role) -> None:
        self._key = key
        self._own, self._other = (b"a", b"l") if role == "agent" else (b"l", b"a")
        self._sealed = self._opened = 0

    def seal(self, body: bytes) -> bytes:
        frame = self._mac(self._own, self._sealed, body) + body
        self._sealed += 1
        return frame

    def open(self, frame: bytes) -> bytes:
        """The body of a frame; ForgedFrame if it is not the next one of the other end."""
        body = frame[_MAC_BYTES:]
        if not hmac.compare_digest(frame[:_MAC_BYTES], self._mac(self._other, self._opened, body)):
            raise ForgedFrame("a frame on the link was forged, repeated or lost on its way")
        self._opened += 1
        return body

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8) + body, "sha256")[:_MAC_BYTES]


class FleetKey:
    """The key of a fleet."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "<FleetKey>"

    def prove(self, role: Role, hello: Hello, challenge: Hello) -> Proof:
        return Proof(self._derive(role, hello, challenge).hex())

    def is_proven(self, proof: Proof, role: Role, hello: Hello, challenge: Hello) -> bool:
        return hmac.compare_digest(proof.proof, self.prove(role, hello, challenge).proof)

    def seal(self, role: Role, hello: Hello, challenge: Hello) -> Seal:
        """The seal of this end of a link, once both ends have proven the key."""
        return Seal(self._derive("link", hello, challenge), role)

    def _derive(self, purpose: str, hello: Hello, challenge: Hello) -> bytes:
        said = ["gpu-worker-pool fleet", purpose, hello.node, hello.nonce, challenge.node, challenge.nonce]
        return hmac.digest(self._secret, json.dumps(said).encode(), "sha256")


def other_key(leader: str, box: str) -> str:
    return f"the leader, {leader[:100]}, and the box {box[:100]} {OTHER_KEY}"


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)
