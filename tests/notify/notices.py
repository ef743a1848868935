"""A notice to tell, and rules that tell it."""

from __future__ import annotations

from gpu_worker_pool.notify.notice import Notice, NoticeGpu, Occasion
from gpu_worker_pool.notify.rules import Rule, Target

NOTICE = Notice(
    Occasion.LOST,
    1.7e9,
    "run-1",
    "ada",
    (NoticeGpu("gpu-1", "GPU-aaaa", 0), NoticeGpu("gpu-1", "GPU-bbbb", 3)),
    reason="revoked",
    by="root",
    why="a $(course)",
    labels=(("command", "train.py"),),
)


def rule(target: Target, *, timeout_s: float = 30.0, number: int | None = None) -> Rule:
    return Rule(frozenset(Occasion), target, timeout_s=timeout_s, number=number)
