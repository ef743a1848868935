"""What a keeper tells of submitted jobs, by their --on-granted and --notify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.run.notices import CommandNotices
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.jobs.job_key import JobKey
from gpu_worker_pool.jobs.life import JobClosed, JobEvent, RunEnded, RunStarted
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.notify.rules import Rule, rules_of_command
from gpu_worker_pool.notify.sender import Sender

from .job_store import JobRecord, JobStore

_FINISH_S: Final = 1.0


class JobNotices:
    """Tells of each job what is written down of it. What is not sent when the keeper is killed is lost."""

    def __init__(self, store: JobStore, say: Callable[[str], None]) -> None:
        self._store = store
        self._say = say
        self._sender = Sender(boot_time)
        self._rules: dict[JobKey, tuple[Rule, ...]] = {}

    def __len__(self) -> int:
        """How many are still to be sent."""
        return len(self._sender)

    def tell(self, record: JobRecord, event: JobEvent) -> None:
        """Tell of an event that is written down."""
        notices = self._of(record)
        if notices is None:
            return
        # A job on several boxes is a `gpu-pool run`, which tells of its lease itself.
        is_gang = record.spec.nodes > 1
        match event:
            case RunStarted() if not is_gang:
                notices.granted()
            case RunEnded() if not (is_gang and event.exit_code is not None):
                if event.exit_code is None and event.end_reason is not None:
                    notices.lost(event.end_reason, event.why)
                state = event.becomes if event.exit_code is None else None
                notices.ended(event.exit_code, event.end_reason or state, event.why)
            case JobClosed():
                notices.ended(event.exit_code, event.becomes, event.why)
        if record.life.state.is_over:
            self._rules.pop(record.key, None)

    def warn(self, record: JobRecord, ending: LeaseEnding | None) -> None:
        """The server will end the lease of a running job; with None, no longer."""
        if (notices := self._of(record)) is not None:
            notices.ending(ending)

    async def close(self) -> None:
        await self._sender.finish(_FINISH_S)

    def _of(self, record: JobRecord) -> CommandNotices | None:
        rules = self._rules_of(record)
        if not rules:
            return None
        notices = CommandNotices(lambda notice: self._sender.tell(notice, rules), record.spec.label, str(record.key))
        if (lease := record.life.lease) is not None:
            notices.set_lease(lease.id, lease.url, lease.uuids, lease.nodes, lease.gpus)
        return notices

    def _rules_of(self, record: JobRecord) -> tuple[Rule, ...]:
        spec, key = record.spec, record.key
        if spec.on_granted is None and not spec.notify:
            return ()
        if key not in self._rules:
            try:
                environ = self._store.environment_of(key)
                self._rules[key] = rules_of_command(spec.on_granted, spec.notify, environ, spec.cwd)
            except (Failure, ValueError) as error:
                self._say(f"job {key}: nobody is told of it: {error}")
                self._rules[key] = ()
        return self._rules[key]
