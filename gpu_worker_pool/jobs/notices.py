"""What `run` and `submit` tell of a command by --on-granted and --notify."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final
from urllib.parse import urlsplit

from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.models import Assignment, LeaseEnding
from gpu_worker_pool.notify.notice import WARNINGS, Notice, NoticeGpu, Occasion
from gpu_worker_pool.notify.rules import Rule

from .job_spec import JobSpec

# How long a command that has ended waits for its last notices.
FINISH_S: Final = 10.0


@dataclass
class CommandNotices:
    """Tells of one command. `label` is what others see of it, `job` its id where it was submitted."""

    tell: Callable[[Notice], None]
    label: str
    job: str | None = None
    _lease_id: str | None = None
    _gpus: tuple[NoticeGpu, ...] = ()

    def set_lease(self, assignment: Assignment) -> None:
        """What the command has. A node that is not known is called by the host of the URL."""
        host, count = urlsplit(assignment.server_url or "").hostname or "localhost", len(assignment.uuids)
        indices = [str(gpu_id).rpartition(":")[2] for gpu_id in assignment.gpu_ids]
        gpus = zip_longest(assignment.uuids, assignment.nodes[:count], indices[:count])
        self._lease_id = assignment.lease_id or None
        self._gpus = tuple(
            NoticeGpu(node or host, uuid, int(index) if index and index.isdecimal() else None)
            for uuid, node, index in gpus
        )

    def granted(self) -> None:
        self._tell(Occasion.GRANTED)

    def ending(self, ending: LeaseEnding | None) -> None:
        """The server will end the lease; with None, no longer."""
        occasion = None if ending is None else WARNINGS.get(ending.reason)
        if ending is not None and occasion is not None:
            self._tell(occasion, reason=ending.reason, ends_at=ending.ends_at.timestamp())

    def lost(self, reason: str | None, why: str | None) -> None:
        self._tell(Occasion.LOST, reason=reason, why=why)

    def ended(self, exit_code: int | None, reason: str | None = None, why: str | None = None) -> None:
        self._tell(Occasion.ENDED, exit_code=exit_code, reason=reason, why=why)

    def _tell(self, occasion: Occasion, **facts: Any) -> None:
        self.tell(
            Notice(
                occasion,
                time.time(),
                self._lease_id,
                user_name(),
                self._gpus,
                labels=(("command", self.label),),
                job=self.job,
                **facts,
            )
        )


@asynccontextmanager
async def told(
    rules: Sequence[Rule], label: str, job: str | None = None, *, finish_s: float = FINISH_S
) -> AsyncIterator[CommandNotices | None]:
    """The notices of a command, which have been sent at the end, or were given up; None without rules."""
    if not rules:
        yield None
        return
    from gpu_worker_pool.notify.sender import Sender  # noqa: PLC0415 - few commands have hooks

    sender = Sender(boot_time)
    try:
        yield CommandNotices(lambda notice: sender.tell(notice, rules), label, job)
    finally:
        await sender.finish(finish_s)


def rules_of_options(spec: JobSpec, environ: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules of --on-granted and --notify, checked."""
    if spec.on_granted is None and not spec.notify:
        return ()
    from gpu_worker_pool.notify.rules import check_services, rules_of_command  # noqa: PLC0415 - few commands have hooks

    try:
        rules = rules_of_command(spec.on_granted, spec.notify, environ, spec.cwd)
        check_services(rules)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    return rules
