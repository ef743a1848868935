"""The box of these tests, and the fields of a lease."""

from __future__ import annotations

# To the letter of the design, section 4.
FIELDS = {
    "id",
    "state",
    "reason",
    "position",
    "gpus",
    "fence",
    "owner",
    "worker_id",
    "host",
    "pid",
    "priority",
    "memory_mb",
    "requested_at",
    "granted_at",
    "ttl_s",
    "expires_in_s",
    "env",
}
A100, T4 = "A100", "T4"
NODE = "box1"
GPUS = 3
