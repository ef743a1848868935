"""Waiters in processes of their own, one after the other: each asks once the one before has been told to wait.

    python -S -m tests.e2e.line PORT NUMBER

It says a line for each that waits, and when standard input ends, one for each that got the GPU, in the order of the grants
as the workers themselves saw them: through one pipe, written to while the GPU is held.
"""

from __future__ import annotations

import json
import os
import sys

from tests.e2e.worker import call, identity


def wait_in_line(port: int, number: int, told: int, served: int) -> None:
    """Ask, say so, wait, say so, give back."""
    lease = f"/leases/waiter{number}"
    form = {**identity(), "ttl_s": 60.0, "worker_id": str(number)}
    status, answer = call(port, "PUT", lease, form, 30.0)
    os.write(told, json.dumps({"waits": number, "status": status, "position": answer["position"]}).encode() + b"\n")
    while answer["state"] == "queued":
        _, answer = call(port, "GET", f"{lease}?wait_s=25", None, 30.0)
    os.write(
        served, json.dumps({"served": number, "fence": answer["fence"], "state": answer["state"]}).encode() + b"\n"
    )
    call(port, "DELETE", lease, None, 30.0)


def main(port: int, number: int) -> int:
    listen, told = os.pipe()
    children = []
    for waiter in range(number):
        child = os.fork()
        if not child:
            wait_in_line(port, waiter, told, sys.stdout.fileno())
            os._exit(0)
        children.append(child)
        sys.stdout.buffer.write(os.read(listen, 4096))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.read()
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
