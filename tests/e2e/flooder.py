"""One process that asks for many tiny shares, as fast as it is answered, and leaves.

    python -m tests.e2e.flooder NAME PORT NUMBER MEMORY_MB

Standard output gets its history (see tests/e2e/run_history.py). It is more important than most, so that its shares
are granted. It asks no more when standard input ends. It gives half of its leases back and leaves the others, and those that wait, to the server, which notices
that it has gone.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from tests.e2e.worker import NoAnswer, call, identity, now

PRIORITY = 0


class Flooder:
    """Asks, looks what it got, and leaves."""

    def __init__(self, name: str, port: int, memory_mb: float) -> None:
        self.name = name
        self.port = port
        self.form = {"memory_mb": memory_mb, "ttl_s": 60.0, "priority": PRIORITY, "worker_id": name, **identity()}
        self.parent = os.getppid()
        self.held: list[str] = []

    def say(self, what: str, **facts: object) -> None:
        os.write(1, json.dumps({"what": what, "who": self.name, "at": now(), **facts}).encode() + b"\n")

    def insist(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any], float]:
        """Until there is an answer: a server may be killed meanwhile, and asking again is harmless."""
        while True:
            sent = now()
            try:
                status, answer = call(self.port, method, path, body, 5.0)
            except NoAnswer:
                if os.getppid() != self.parent:
                    sys.exit("the process that started it is gone, and so is the server")
                time.sleep(0.05)
            else:
                if status < 500:
                    return status, answer, sent

    def ask(self, turn: int) -> None:
        lease = f"{self.name}-{turn}"
        wishes = {key: self.form[key] for key in ("memory_mb", "priority", "ttl_s")}
        self.say("asks", lease=lease, turn=turn, gpus=1, **wishes)
        self.tell(lease, "PUT", *self.insist("PUT", f"/leases/{lease}", self.form))

    def tell(self, lease: str, method: str, status: int, answer: dict[str, Any], sent: float) -> None:
        """Write down what was answered about a lease."""
        facts = {key: answer[key] for key in ("state", "fence", "end_reason", "detail") if answer.get(key)}
        uuids, gpu_ids = ([gpu[key] for gpu in answer.get("gpus", ())] for key in ("uuid", "gpu_id"))
        self.say("answered", call=method, lease=lease, sent=sent, status=status, uuids=uuids, **facts)
        # The server watches this process, so no TTL runs against the lease.
        if answer.get("state") == "active" and answer["expires_in_s"] is None and lease not in self.held:
            self.held.append(lease)
            self.say("took", lease=lease, uuids=uuids, gpu_ids=gpu_ids, fence=answer["fence"])

    def look(self) -> None:
        """See what was granted after it had been asked for."""
        _, pool, sent = self.insist("GET", "/pool")
        for lease in pool["leases"]:
            if lease["worker_id"] == self.name and lease["expires_in_s"] is None:
                self.tell(lease["id"], "GET", 200, lease, sent)
            elif lease["worker_id"] == self.name:
                # Only the answer to its own call tells its client that a grant is taken up.
                self.tell(lease["id"], "GET", *self.insist("GET", f"/leases/{lease['id']}"))

    def leave(self) -> None:
        for number, lease in enumerate(self.held):
            self.say("left", lease=lease, why="done", left_at=now())
            if number % 2:
                self.tell(lease, "DELETE", *self.insist("DELETE", f"/leases/{lease}?as=holder"))
        self.say("exits")


def main(name: str, port: int, number: int, memory_mb: float) -> None:
    flooder = Flooder(name, port, memory_mb)
    for turn in range(number):
        flooder.ask(turn)
        if select.select([sys.stdin], [], [], 0.0)[0]:
            break
    while not flooder.held:
        flooder.look()
        time.sleep(0.05)
    flooder.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
