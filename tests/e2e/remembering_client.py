"""A client that remembers what was acknowledged, and looks whether it is still so after a server was killed."""

from __future__ import annotations

from typing import Any

from tests.e2e.worker import NoAnswer, call

TIMEOUT_S = 20.0


class Died(Exception):  # noqa: N818 - it is what was ordered
    """The server is gone; `call` is what was not answered."""


class Client:
    """One who remembers what was acknowledged, and checks that against a server that has come up again."""

    def __init__(self, prefix: str = "") -> None:
        self.port = 0
        self.prefix = prefix
        # The only GPUs to ask for, if not any.
        self.among: list[str] | None = None
        self.acknowledged: dict[str, dict[str, Any]] = {}
        self.pending: tuple[str, str] | None = None
        self.fences: dict[str, int] = {}
        self.died_in: list[str] = []
        self.was_written: list[bool] = []
        self.number = 0

    def call(self, method: str, lease: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """The answer, noted as acknowledged."""
        self.pending = (method, lease)
        path = f"{self.prefix}/leases/{lease}" + (f"?wait_s={wait_s}" if method == "GET" else "")
        status, answer = self._ask(method, path, self._form() if method == "PUT" else None)
        assert status in {200, 201, 202}, answer
        self.pending = None
        if answer["state"] == "active":
            self.fences.setdefault(lease, answer["fence"])
        self.acknowledged[lease] = answer
        return answer

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """The server may be killed in any call: what it finds on a GPU is written, too."""
        try:
            return call(self.port, method, path, body, TIMEOUT_S)
        except NoAnswer as error:
            self.died_in.append(method)
            raise Died from error

    def _form(self) -> dict[str, object]:
        return {"ttl_s": 60.0} if self.among is None else {"ttl_s": 60.0, "among": self.among}

    def work(self) -> None:
        """A holder, a waiter, and the hand-over, each step over before the next one."""
        self.number += 1
        holder, waiter = f"holder{self.number}", f"waiter{self.number}"
        assert self.call("PUT", holder)["state"] == "active"
        assert self.call("PUT", waiter)["state"] == "queued"
        self.end(holder)
        self.call("GET", waiter, wait_s=10)
        assert self.call("GET", waiter)["state"] == "active", "what was set aside is taken up"
        self.end(waiter)

    def end(self, lease: str) -> None:
        """Give back, and wait until the GPU is free of it."""
        self.call("DELETE", lease)
        while self.call("GET", lease)["state"] != "ended":
            pass

    def verify(self) -> None:
        """After a restart."""
        pending, self.pending = self.pending, None
        for lease, before in self.acknowledged.items():
            if pending is None or lease != pending[1]:
                assert_kept(before, self.look(lease))
        if pending is not None:
            self.verify_pending(*pending)
        active = [lease["id"] for lease in self.leases() if lease["state"] == "active"]
        assert len(active) <= 1, f"one GPU, and these have it: {active}"
        fences = list(self.fences.values())
        assert fences == sorted(set(fences)), f"these do not grow: {fences}"

    def verify_pending(self, method: str, lease: str) -> None:
        found, before = self.look(lease), self.acknowledged.get(lease)
        if method == "PUT" and before is None:
            self.was_written.append(found is not None)
            again = self.call("PUT", lease)
            assert found is None or (again["fence"] or found["fence"] is None), "a retry took a grant away"
            assert found is None or not found["fence"] or again["fence"] == found["fence"], (
                "a retry took a second grant"
            )
        elif method == "DELETE":
            assert found is not None
            assert found["state"] in {"active", "ended", "draining"}
            assert self.call("DELETE", lease)["state"] == "ended"
        elif before is not None:
            assert_kept(before, found)

    def clear(self) -> None:
        """End what is left, and wait until the GPU is free of it."""
        for lease in self.leases():
            if lease["state"] in {"active", "queued"}:
                self.end(lease["id"])
        while self.leases():
            pass  # one that was given back before the server died still drains

    def look(self, lease: str) -> dict[str, Any] | None:
        status, answer = self._ask("GET", f"{self.prefix}/leases/{lease}")
        assert status in {200, 404}
        return answer if status == 200 else None

    def leases(self) -> list[dict[str, Any]]:
        status, answer = self._ask("GET", f"{self.prefix}/leases")
        assert status == 200
        leases: list[dict[str, Any]] = answer["leases"]
        return leases


def assert_kept(before: dict[str, Any], after: dict[str, Any] | None) -> None:
    assert after is not None, f"forgotten: {before}"
    possible = {"queued": {"queued", "active"}, "active": {"active"}, "draining": {"draining", "ended"}}
    assert after["state"] in possible.get(before["state"], {"draining", "ended"}), (before, after)
    if before["fence"] is not None:
        same = ("fence", "end_reason", "requested_at", "granted_at")
        assert [after[key] for key in same] == [before[key] for key in same]
        assert [gpu["uuid"] for gpu in after["gpus"]] == [gpu["uuid"] for gpu in before["gpus"]]
