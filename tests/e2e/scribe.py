"""Writes histories by hand, for the tests of the checker."""

from __future__ import annotations

import shlex
from typing import Any

from tests.e2e.history_check import check
from tests.e2e.run_history import Line, RunHistory

TTL_S = 3.0
BEAT_S = 1.0


class Scribe:
    """Writes histories. Times are seconds; a worker's name is its lease's."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.resources: dict[str, list[Line]] = {}

    def play(self, script: str) -> Scribe:
        """Write what a script says: calls of these methods with semicolons between them, their arguments as words."""
        for step in script.split(";"):
            method, *words = shlex.split(step)
            named = dict(word.split("=", 1) for word in words if "=" in word)
            values = [_value(word) for word in words if "=" not in word]
            getattr(self, method)(*values, **{name: _value(text) for name, text in named.items()})
        return self

    def nemesis(self, what: str, at: float, **facts: Any) -> None:
        self.lines.append({"what": what, "at": at, "who": "nemesis", **facts})

    def say(self, what: str, at: float, who: str, **facts: Any) -> None:
        self.lines.append({"what": what, "at": at, "who": who, "lease": who, **facts})

    def asks(self, who: str, at: float, **wishes: Any) -> None:
        told = {"turn": 1, "gpus": 1, "memory_mb": None, "priority": 0, "ttl_s": TTL_S, **wishes}
        self.say("asks", at, who, **told)

    def answer(
        self, who: str, at: float, state: str, *, call: str = "GET", sent: float | None = None, **facts: Any
    ) -> None:
        told = {"call": call, "sent": at - 0.1 if sent is None else sent, "status": 200, "uuids": [], **facts}
        self.say("answered", at, who, state=state, **told)

    def granted(self, who: str, at: float, fence: int, gpu: str = "gpu0") -> None:
        self.answer(who, at, "active", fence=fence, uuids=[gpu], until=at - 0.1 + TTL_S - BEAT_S)

    def took(self, who: str, at: float, fence: int, gpu: str = "gpu0") -> None:
        self.granted(who, at, fence, gpu)
        self.say("took", at, who, uuids=[gpu], gpu_ids=[int(gpu[-1])], fence=fence, until=at - 0.1 + TTL_S - BEAT_S)

    def renewed(self, who: str, at: float, left_s: float = TTL_S) -> None:
        self.say("renewed", at, who, sent=at - 0.1, left_s=left_s, until=at - 0.1 + left_s - BEAT_S)

    def left(self, who: str, at: float) -> None:
        self.say("left", at, who, left_at=at, why="done")

    def gave_back(self, who: str, at: float) -> None:
        self.left(who, at)
        self.answer(who, at + 0.2, "ended", call="DELETE", sent=at + 0.1, end_reason="released")

    def killed(self, who: str, at: float) -> None:
        self.nemesis("killed", at, worker=who, reaped_at=at + 0.01)

    def wrote(self, who: str, at: float, fence: int, *, until: float, gpu: str = "gpu0") -> None:
        number = sum(len(lines) for lines in self.resources.values())
        self.resources.setdefault(gpu, []).append({"fence": fence, "lease": who, "write": number})
        self.say("wrote", at, who, uuid=gpu, write=number, before=at - 0.001, until=until)

    def found(self) -> list[str]:
        return [violation.kind for violation in check(RunHistory(self.lines, self.resources, usable_mb=100.0))]


def _value(word: str) -> Any:
    if word.startswith("["):
        return [_value(part) for part in word[1:-1].split(",") if part]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"True": True, "False": False, "true": True, "false": False}.get(word, word)
