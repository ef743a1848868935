"""How a box shows another box of its fleet that a call is from the fleet: by an HMAC with the key that all boxes have.

It proves who made the call, and hides nothing: boxes need TLS between them, or a network that they trust.
"""

from __future__ import annotations

import hmac
import json
from hashlib import sha256

HEADER = "gpu-pool-signature"


def sign(secret: str, method: str, path: str, body: bytes) -> str:
    said = json.dumps(["gpu-worker-pool call", method, path, sha256(body).hexdigest()])
    return hmac.new(secret.encode(), said.encode(), sha256).hexdigest()


def is_signed(signature: str, secret: str, method: str, path: str, body: bytes) -> bool:
    return hmac.compare_digest(signature.encode("utf-8", "replace"), sign(secret, method, path, body).encode())
