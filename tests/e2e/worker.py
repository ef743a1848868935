"""A worker as an honest client behaves, in a process of its own and with nothing but the standard library.

    python -I -S worker.py '{"name": "w1", "port": 8123, "folder": "/tmp/run", ...}'

It asks with an id of its own and asks again with the *same* id until it is answered; it waits in long polls; it renews
at a third of the TTL; and it gives up one heartbeat before the server would expire it, reckoned from when the last
renewal that succeeded (or the request that was answered with the grant) was *sent* and what that answer said is left. All of that is on CLOCK_BOOTTIME, which
goes on while the process is stopped, and it is looked at before anything is touched: a worker that wakes up after a
SIGSTOP finds that its time is over.

While it holds a GPU it takes a lock on a file named after that GPU: exclusive, or shared where the GPU is shared. That is the
witness, and it is independent of the pool. Nobody waits for that lock; one that cannot be had at once is written down.
It writes to a "resource" as well: a file per GPU to which everybody appends (fence, lease). The order of its lines is the
order of the writes, so whoever reads it can tell which of them a resource that compares fences would have refused.

Everything it sees goes to its history, a line in one write. See tests/e2e/history_check.py for what must not be
found there.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
# How long one that is to end still tries to give back what it has.
FAREWELL_S = 3.0
RENEW_TIMEOUT_S = 1.0
# A server that did not answer is not asked for so long if there are others, as the package's client does not.
AVOIDED_S = 5.0
# How long a call may take beyond what it is to wait: less where another server of the same fleet can be asked instead.
PATIENCE_S, PATIENCE_WITH_OTHERS_S = 1.5, 0.5


@dataclass(frozen=True)
class Orders:
    """What a worker is to do. Without `rounds` it goes on until SIGTERM; `crowd` makes it that many processes. With `flood` it asks
    for that many leases at once, and leaves. Without a folder its history goes to standard output.
    """

    name: str
    port: int
    folder: str
    seed: int = 0
    is_local: bool = True
    gpus: int = 1
    memory_mb: float | None = None
    priority: int = 0
    ttl_s: float = 30.0
    shortest_hold_s: float = 0.0
    longest_hold_s: float = 0.0
    longest_wait_s: float = 2.0
    rounds: int | None = None
    crowd: int = 0
    flood: int = 0
    # Other servers of the same fleet, to turn to where one does not answer or does not lead.
    other_ports: tuple[int, ...] = ()
    # Of the paths: /fleet for GPUs of the whole fleet.
    prefix: str = ""

    def encoded(self) -> str:
        return json.dumps(asdict(self))


class NoAnswer(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The connection could not be made, broke off, or nothing came in time."""


class Farewell(Exception):  # noqa: N818
    """It was told to end, or its parent is gone, and nobody answers."""


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def call(port: int, method: str, path: str, body: object, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """One request on one connection; the answer counts only if all of it came."""
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    deadline = now() + timeout_s
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(head.encode() + payload)
            while (answer := parse(received)) is None:
                connection.settimeout(max(deadline - now(), 0.001))
                chunk = connection.recv(65536)
                if not chunk:
                    raise NoAnswer(f"cut off after {len(received)} bytes")
                received += chunk
    except OSError as error:
        raise NoAnswer(repr(error)) from error
    return answer


def parse(received: bytes) -> tuple[int, dict[str, Any]] | None:
    """Status and body of an answer; None while some of it is missing."""
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return None
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers["content-length"])
    return (int(status_line.split()[1]), json.loads(body[:length])) if len(body) >= length else None


def identity() -> dict[str, object]:
    """What tells the server that this process is one of its own machine."""
    with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123 - pathlib takes as long to import as all the rest
        started = stat.read().rpartition(b")")[2].split()[19]
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:  # noqa: PTH123
        boot_id = boot.read().strip()
    return {
        "pid": os.getpid(),
        "pid_started": float(started),
        "boot_id": boot_id,
        "pid_namespace": os.readlink("/proc/self/ns/pid"),  # noqa: PTH115
    }


class Worker:
    """Asks, holds, gives back, again and again."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.random = random.Random(f"{orders.seed}/{orders.name}")
        self.form: dict[str, object] = {
            "gpus": orders.gpus,
            "memory_mb": orders.memory_mb,
            "priority": orders.priority,
            "ttl_s": orders.ttl_s,
            "worker_id": orders.name,
            **(identity() if orders.is_local else {}),
        }
        self.beat_s = orders.ttl_s / 3
        self.ports = [orders.port, *orders.other_ports]
        self.avoided_until: dict[int, float] = {}
        self.history = os.open(f"{orders.folder}/{orders.name}.history", APPEND, 0o600) if orders.folder else 1
        self.turn = 0
        self.writes = 0
        self.ends_at: float | None = None
        self.parent = os.getppid()

    def on_term(self, *_: object) -> None:
        self.ends_at = now() + FAREWELL_S

    def say(self, what: str, **facts: object) -> None:
        line = {"what": what, "who": self.orders.name, "at": now(), **facts}
        os.write(self.history, json.dumps(line).encode() + b"\n")

    def run(self) -> None:
        rounds = 0
        try:
            if self.orders.flood:
                self.flood()
            while self.ends_at is None and (self.orders.rounds is None or rounds < self.orders.rounds):
                rounds += self.one_round()
        except Farewell:
            pass
        self.say("exits", rounds=rounds)

    # --- calls -----------------------------------------------------------------------------------------------------

    def try_call(self, method: str, lease: str, path: str, body: object, timeout_s: float) -> tuple[Any, ...]:
        """(status, body, when it was sent); status 0 where there was no answer. Both are written down."""
        sent = now()
        self.ports.sort(
            key=lambda port: self.avoided_until.get(port, 0.0) > sent
        )  # stable: the order is kept otherwise
        try:
            status, answer = call(self.ports[0], method, path, body, timeout_s)
        except NoAnswer as error:
            self.say("failed", call=method, lease=lease, sent=sent, error=str(error))
            self.avoided_until[self.ports[0]] = now() + AVOIDED_S
            self.ports.append(self.ports.pop(0))
            return 0, {}, sent
        if status == 503:
            self.ports.append(self.ports.pop(0))
        shown = ("state", "fence", "position", "end_reason", "ended_by", "detail")
        facts = {key: answer[key] for key in shown if answer.get(key)}
        if answer.get("state") == "active":
            facts["until"] = self.safe_until(answer, sent)
        uuids = [gpu["uuid"] for gpu in answer.get("gpus", ())]
        self.say("answered", call=method, lease=lease, sent=sent, status=status, uuids=uuids, **facts)
        return status, answer, sent

    def safe_until(self, answer: dict[str, Any], sent: float) -> float:
        """One heartbeat before the server would expire it. Not reckoned by the whole TTL: an active lease that is merely
        shown is not renewed by that, and the grant may have been answered before, to a connection that broke. A lease of
        a process that the server watches lasts as long as the process.
        """
        left_s = answer["expires_in_s"]
        return inf if left_s is None else sent + float(left_s) - self.beat_s

    def insist(self, method: str, lease: str, wait_s: float = 0.0) -> tuple[Any, ...]:
        """Until there is an answer. Asking again is harmless, so a poll that failed may also be another PUT."""
        while True:
            path, body = f"{self.orders.prefix}/leases/{lease}", None
            if method == "PUT":
                body = {**self.form, "wait_s": wait_s}
            elif method == "GET":
                path += f"?wait_s={wait_s}"
            else:
                path += "?as=holder"
            patience_s = PATIENCE_WITH_OTHERS_S if self.orders.other_ports else PATIENCE_S
            status, answer, sent = self.try_call(method, lease, path, body, wait_s + patience_s)
            if status and status < 500 and status != 429:
                return status, answer, sent
            is_orphan = os.getppid() != self.parent
            if is_orphan or (self.ends_at is not None and now() > self.ends_at):
                raise Farewell
            if method == "GET" and self.random.random() < 0.3:
                method = "PUT"
            time.sleep(self.random.uniform(0.01, 0.15))

    def flood(self) -> None:
        """Ask as fast as one is answered, see what is granted, give half of it back, and leave the rest to the server, which
        notices that this process has gone.
        """
        asked: list[str] = []
        while len(asked) < self.orders.flood and self.ends_at is None:
            asked.append(self.new_lease())
            self.insist("PUT", asked[-1])
        held: list[str] = []
        while not held:
            for lease in asked:
                _, answer, _ = self.insist("GET", lease)
                # The server watches this process, so no TTL runs against a lease that is taken up.
                if answer.get("state") == "active" and answer["expires_in_s"] is None:
                    gpus = {f"{key}s": [gpu[key] for gpu in answer["gpus"]] for key in ("uuid", "gpu_id")}
                    self.say("took", lease=lease, fence=answer["fence"], **gpus)
                    held.append(lease)
        for number, lease in enumerate(held):
            self.say("left", lease=lease, why="done", left_at=now())
            if number % 2:
                self.insist("DELETE", lease)

    # --- a round ---------------------------------------------------------------------------------------------------

    def one_round(self) -> int:
        """1 where a GPU was held, 0 where it came to nothing."""
        lease = self.new_lease()
        found = self.get(lease)
        if found is None:
            return 0
        answer, sent = found
        until = self.safe_until(answer, sent)
        if until - now() < self.beat_s:
            # It was granted at the end of a long poll: when exactly is not known, so it is renewed before it is used.
            until = self.renew(lease, now() + self.beat_s) or 0.0
        has_held = now() < until
        if has_held:
            self.hold(lease, answer["gpus"], answer["fence"], until)
        self.give_back(lease)
        return int(has_held)

    def new_lease(self) -> str:
        lease = f"{self.orders.name}-{self.random.getrandbits(64):016x}"
        wishes = {key: self.form.get(key) for key in ("gpus", "memory_mb", "priority", "ttl_s")}
        self.turn += 1
        self.say("asks", lease=lease, turn=self.turn, **wishes)
        return lease

    def get(self, lease: str) -> tuple[dict[str, Any], float] | None:
        """The lease once it is active and when that was asked; None where it ended before."""
        status, answer, sent = self.insist("PUT", lease, self.wait_s())
        while status in {200, 201, 202}:
            if answer["state"] == "active":
                return answer, sent
            if answer["state"] != "queued":
                return None
            if self.ends_at is not None:
                self.insist("DELETE", lease)
                return None
            status, answer, sent = self.insist("GET", lease, self.wait_s())
        return None

    def wait_s(self) -> float:
        return round(self.random.uniform(0.0, self.orders.longest_wait_s), 2)

    def renew(self, lease: str, deadline: float) -> float | None:
        """Until when it is safe now; None where it was lost, 0 where nobody answered by the deadline."""
        while (left_s := deadline - now()) > 0:
            path, body = f"{self.orders.prefix}/leases/renew", {"ids": [lease]}
            status, answer, sent = self.try_call("POST", lease, path, body, min(left_s, RENEW_TIMEOUT_S))
            # An id for which no box answers is in neither list.
            if status == 200 and (answer["lost"] or answer["renewed"]):
                if answer["lost"]:
                    self.say("lost", lease=lease, sent=sent, reason=answer["lost"][0]["reason"])
                    return None
                until = self.safe_until(answer["renewed"][0], sent)
                left_s = answer["renewed"][0]["expires_in_s"]
                self.say("renewed", lease=lease, until=until, sent=sent, left_s=inf if left_s is None else left_s)
                return until
            time.sleep(0.02)
        return 0.0

    def hold(self, lease: str, gpus: list[dict[str, Any]], fence: int, until: float) -> None:
        uuids, gpu_ids = [gpu["uuid"] for gpu in gpus], [gpu["gpu_id"] for gpu in gpus]
        self.say("took", lease=lease, uuids=uuids, gpu_ids=gpu_ids, fence=fence, until=until)
        witnesses = [self.take_witness(lease, uuid) for uuid in uuids]
        done_at = now() + self.random.uniform(self.orders.shortest_hold_s, self.orders.longest_hold_s)
        renew_at = min(until, now() + 2 * self.beat_s) - self.beat_s
        why = "done"
        self.write(lease, uuids, fence, until)
        while (at := now()) < done_at and self.ends_at is None:
            if at >= until:
                why = "gave up"
                break
            if at >= renew_at:
                renewed = self.renew(lease, min(until, now() + self.beat_s))
                if renewed is None:
                    why = "lost"
                    break
                until = renewed or until
                renew_at = min(until, now() + 2 * self.beat_s) - self.beat_s
                self.write(lease, uuids, fence, until)
            time.sleep(max(min(done_at, renew_at, until) - now(), 0.001))
        if why == "done" and now() >= until:
            why = "gave up"
        if why == "done":
            self.write(lease, uuids, fence, until)
        left_at = now()
        for witness in witnesses:
            os.close(witness)
        self.say("left", lease=lease, why=why, left_at=left_at)

    def give_back(self, lease: str) -> None:
        self.insist("DELETE", lease)
        if self.random.random() < 0.3:
            self.insist(self.random.choice(("GET", "PUT")), lease)  # it must have stayed ended

    # --- what proves it --------------------------------------------------------------------------------------------

    def take_witness(self, lease: str, uuid: str) -> int:
        descriptor = os.open(f"{self.orders.folder}/{uuid}.witness", APPEND, 0o600)
        kind = fcntl.LOCK_EX if self.orders.memory_mb is None else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say("witness_busy", lease=lease, uuid=uuid)
        else:
            self.say("witness", lease=lease, uuid=uuid)
        return descriptor

    def write(self, lease: str, uuids: list[str], fence: int, until: float) -> None:
        """To the resources behind these GPUs. Those who share one may write in any order, so they do not."""
        if self.orders.memory_mb is not None:
            return
        for uuid in uuids:
            self.writes += 1
            line = json.dumps({"fence": fence, "lease": lease, "write": self.writes}).encode() + b"\n"
            before = now()
            if before >= until:
                return
            descriptor = os.open(f"{self.orders.folder}/{uuid}.resource", APPEND, 0o600)
            os.write(descriptor, line)
            os.close(descriptor)
            self.say("wrote", lease=lease, uuid=uuid, write=self.writes, before=before, until=until)


def run_one(orders: Orders) -> None:
    worker = Worker(orders)
    signal.signal(signal.SIGTERM, worker.on_term)
    worker.run()


def run_crowd(orders: Orders) -> None:
    """So many processes at once: forked, because a start of Python takes longer than what they are here to do."""
    gate, opener = os.pipe()
    children = []
    for number in range(orders.crowd):
        child = os.fork()
        if not child:
            os.close(opener)
            os.read(gate, 1)  # returns when the gate is opened
            run_one(Orders(**{**asdict(orders), "name": f"{orders.name}.{number}", "crowd": 0}))
            os._exit(0)
        children.append(child)
    os.close(opener)
    failures = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(len(failures))


if __name__ == "__main__":
    given = Orders(**json.loads(sys.argv[1]))
    if given.crowd:
        run_crowd(given)
    else:
        run_one(given)
