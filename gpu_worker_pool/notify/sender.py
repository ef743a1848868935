"""Sends notices to where rules say. Nothing waits for it: a notice is taken in at once, or dropped.

Notices to one target go one after another, those to several targets side by side. What is still to be sent is bounded in
number and in time, so that no target can hold up or fill the process that tells.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Final

from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guarded import Guarded, given_input
from gpu_worker_pool.host.pauses import Backoff

from .notice import Notice
from .rules import APPRISE, Program, Rule, Target

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

MOST_FOR_ONE: Final = 250
MOST_AT_ONCE: Final = 8
ATTEMPTS: Final = 5
ATTEMPTS_AT_THE_END: Final = 2
BACKOFF: Final = Backoff(first_s=1.0, factor=4.0, max_s=60.0)
# A notice that has waited for longer is dropped: its target is down.
MAX_AGE_S: Final = 300.0
# A killed program is gone by then, unless it is stuck in the kernel or belongs to another user.
_KILL_S: Final = 5.0
_MOST_OUTPUT: Final = 1_000_000
# What a program of the operator needs to run at all. Nothing else of the server's environment is passed on.
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


@dataclass(slots=True)
class _Waiting:
    notice: Notice
    rule: Rule
    since: float
    attempts: int = 0


class Sender:
    """Must be made and used in one event loop. `clock` counts seconds and never goes back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[Target, deque[_Waiting]] = {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._closing, self._last_attempts = asyncio.Event(), ATTEMPTS
        # Targets that failed: each is logged once, until a notice arrives there again.
        self._failing: set[Target] = set()

    def __repr__(self) -> str:
        return f"<Sender {len(self)} waiting for {len(self._waiting)} targets>"

    def __len__(self) -> int:
        """How many notices are still to be sent."""
        return sum(map(len, self._waiting.values()))

    def tell(self, notice: Notice, rules: Iterable[Rule]) -> None:
        """Send this to the targets of those rules that it fits."""
        for rule in rules:
            if not rule.applies_to(notice) or self._closing.is_set():
                continue
            queue = self._waiting.setdefault(rule.target, deque())
            if len(queue) >= MOST_FOR_ONE:
                self._give_up(_Waiting(notice, rule, 0.0), f"{MOST_FOR_ONE} notices wait for it already")
                continue
            queue.append(_Waiting(notice, rule, self._clock()))
            if rule.target not in self._tasks:
                self._tasks[rule.target] = asyncio.ensure_future(self._deliver(rule.target, queue))

    async def finish(self, within_s: float) -> None:
        """Send what can be sent in this time, and close. Notices that wait for their next attempt have it now."""
        self._last_attempts = ATTEMPTS if within_s >= MAX_AGE_S else ATTEMPTS_AT_THE_END
        self._closing.set()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=within_s)
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if len(self):
            logger.warning("notices that were not sent, because this program ends: %d", len(self))

    async def _deliver(self, target: Target, queue: deque[_Waiting]) -> None:
        """Send what waits for a target, until nothing does."""
        while queue:
            is_closing = self._closing.is_set()
            async with self._at_once:
                sent, why = await _send(target, queue)
            for _ in range(sent):
                queue.popleft()
                self._failing.discard(target)
            if why is None:
                continue
            queue[0].attempts += 1
            while queue and self._is_over(queue[0], self._last_attempts if is_closing else ATTEMPTS):
                self._give_up(queue.popleft(), why)
            if queue and (failed := queue[0].attempts):
                pause_s = BACKOFF.delay_s(failed - 1, random.random())  # noqa: S311 - no secret
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.sleep(pause_s) if is_closing else self._closing.wait(), pause_s)
        del self._waiting[target], self._tasks[target]

    def _is_over(self, waiting: _Waiting, attempts: int) -> bool:
        # A program may have done something by the time it fails: a pager must not page twice.
        most = 1 if isinstance(waiting.rule.target, Program) else attempts
        return waiting.attempts >= most or self._clock() > waiting.since + MAX_AGE_S

    def _give_up(self, waiting: _Waiting, why: str) -> None:
        if waiting.rule.target not in self._failing:
            self._failing.add(waiting.rule.target)
            logger.error("the notice %s was not sent to %s: %s", waiting.notice.occasion, waiting.rule, why)


async def _send(target: Target, queue: Sequence[_Waiting]) -> tuple[int, str | None]:
    """Send notices, those of Apprise all in one run; how many were sent, and why the next one was not."""
    waiting = queue[0]
    if isinstance(target, Program):
        why, _ = await run_program(
            target.arguments,
            waiting.notice.as_json(),
            waiting.rule.timeout_s,
            env=_environment(target, waiting.notice),
            cwd=target.cwd,
        )
        return (1 if why is None else 0), why
    said = "".join(
        json.dumps({"url": target.url, "title": notice.title(), "body": notice.text(), "is_bad": notice.is_bad}) + "\n"
        for notice in (each.notice for each in queue)
    )
    why, output = await run_program(APPRISE, said.encode(), waiting.rule.timeout_s, env=os.environ, cwd="/")
    answers = [json.loads(line) for line in output.splitlines()]
    if answers and answers[-1] is not None:
        return len(answers) - 1, answers[-1]
    return len(answers), why.replace(APPRISE[0], "Apprise") if why and len(answers) < len(queue) else None


def _environment(program: Program, notice: Notice) -> dict[str, str]:
    needed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    said = {
        "GPU_POOL_EVENT": notice.occasion.value,
        "GPU_POOL_LEASE_ID": notice.lease_id,
        "GPU_POOL_OWNER": notice.owner,
        "GPU_POOL_EVENT_NODE": ",".join(notice.nodes),
        "GPU_POOL_REASON": notice.reason,
        "GPU_POOL_JOB_ID": notice.job,
    }
    # A NUL cannot be passed on.
    env = {name: text.replace("\0", "") for name, text in said.items() if text}
    return {**(needed if program.env is None else dict(program.env)), **env}


async def run_program(
    argv: Sequence[str], sent: bytes, limit_s: float, *, env: Mapping[str, str], cwd: str | None = None
) -> tuple[str | None, bytes]:
    """Run a program without a lease, with this standard input, at most for this time; why it failed, or None, and its output.
    All that it started is ended then, also if this is cancelled.
    """
    name, limit = argv[0], boot_time() + limit_s
    try:
        guarded = Guarded.start()
    except (Failure, OSError) as error:
        return _why_not_run(name, error), b""
    output = b""
    try:
        async with asyncio.timeout(limit_s + _KILL_S):
            with given_input(sent) as given, TemporaryFile() as out, open(os.devnull, "wb") as nothing:  # noqa: PTH123, ASYNC230 - at once
                # Without grace: SIGKILL follows SIGTERM at once.
                streams = (given, out.fileno(), nothing.fileno())
                await guarded.run(argv, env, streams, cwd=cwd, grace_s=0.0, limit=limit)
                ended = await guarded.wait()
                out.seek(0)
                output = out.read(_MOST_OUTPUT)
    except TimeoutError:
        return f"{name} cannot be ended", b""
    except (Failure, OSError) as error:
        return _why_not_run(name, error), b""
    finally:
        with suppress(TimeoutError):
            await asyncio.wait_for(guarded.close(), _KILL_S)
    if ended.was_limited:
        return f"{name} has not ended within {limit_s:g} s", output
    return f"{name} ended with {ended.exit_code}" if ended.exit_code else None, output


def _why_not_run(name: str, error: Failure | OSError) -> str:
    return f"{name} cannot be run: {error.strerror or error}" if isinstance(error, OSError) else str(error)
