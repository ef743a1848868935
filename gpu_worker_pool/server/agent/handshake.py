"""How a box and its leader prove to each other that they know the key of their fleet, without showing it.

Each makes a nonce; a proof is an HMAC over both of them, the role, and the node of the box. The agent proves itself first:
a caller from anywhere learns nothing that it could try keys on. What follows is not encrypted: boxes need TLS between
them, or a network that they trust.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from typing import Literal

LEAST_CHARACTERS = 16
_NONCE_BYTES = 32
OTHER_KEY = "have different fleet keys; set GPU_POOL_FLEET_KEY to the same secret on all boxes of the fleet"

Role = Literal["agent", "leader"]


@dataclass(frozen=True, slots=True)
class Hello:
    """From the agent: it wants to join as this node."""

    node: str
    nonce: str
    version: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """From the leader, whose node this is."""

    node: str
    nonce: str
    version: str


@dataclass(frozen=True, slots=True)
class Proof:
    """From both."""

    proof: str


class FleetKey:
    """The key of a fleet; None if its boxes have none, which is only for boxes of one user on one machine."""

    def __init__(self, secret: str | None) -> None:
        self._secret = (secret or "").encode()
        self.is_set = secret is not None

    @property
    def secret(self) -> str:
        """The key itself, for signature.py; empty if there is none."""
        return self._secret.decode()

    def __repr__(self) -> str:
        return f"<FleetKey {'set' if self.is_set else 'not set'}>"

    def prove(self, role: Role, hello: Hello, challenge: Challenge) -> Proof:
        said = ["gpu-worker-pool fleet", role, hello.node, hello.nonce, challenge.node, challenge.nonce]
        return Proof(hmac.new(self._secret, json.dumps(said).encode(), sha256).hexdigest())

    def is_proven(self, proof: Proof, role: Role, hello: Hello, challenge: Challenge) -> bool:
        return hmac.compare_digest(proof.proof.encode(), self.prove(role, hello, challenge).proof.encode())


def other_key(leader: str, box: str) -> str:
    return f"the leader, {leader[:100]}, and the box {box[:100]} {OTHER_KEY}"


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


HEADER = "gpu-pool-signature"


def sign(secret: str, method: str, path: str, body: bytes) -> str:
    said = json.dumps(["gpu-worker-pool call", method, path, sha256(body).hexdigest()])
    return hmac.new(secret.encode(), said.encode(), sha256).hexdigest()


def is_signed(signature: str, secret: str, method: str, path: str, body: bytes) -> bool:
    return hmac.compare_digest(signature.encode("utf-8", "replace"), sign(secret, method, path, body).encode())


VERSION: str = import_module("gpu_worker_pool").__version__
