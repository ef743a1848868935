"""The messages of `run`, as sentences or JSON lines. They go to standard error, because the output is the command's."""

from __future__ import annotations

import json
from time import time
from typing import Any, Final

from gpu_worker_pool.cli.output import complain, tell
from gpu_worker_pool.cli.pools.report import show_gpus
from gpu_worker_pool.cli.units import show_duration, show_moment
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.jobs.notices import CommandNotices
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.leases import LeaseView, coming_end

_EXPECTED: Final = ("expected_start_at", "expected_start_basis", "expected_after")


class RunReporter:
    """Reports each event as a JSON line, or as a sentence if it matters to a person; `is_quiet`: losses and warnings."""

    def __init__(self, *, is_json: bool, is_quiet: bool, notices: CommandNotices | None = None) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self._notices = notices
        self._is_granted = False

    def warn(self, message: str) -> None:
        if self.is_json:
            self._print("warning", message=message)
        else:
            complain(message)

    def note(self, message: str) -> None:
        """A warning that a quiet run does without."""
        if self.is_json or not self.is_quiet:
            self.warn(message)

    def granted(self, assignment: Assignment, waited_s: float, *, has_waited: bool) -> None:
        """Which GPUs, and where there was a wait, for how long."""
        self._note_grant(assignment)
        gpus = list(assignment.gpu_ids)
        ends_at = None if assignment.ends_at is None else assignment.ends_at.timestamp()
        if self.is_json:
            facts = {"gpus": gpus, "lease_id": assignment.lease_id, "waited_s": round(waited_s, 3)}
            self._print("granted", **facts, ends_at=iso_time(ends_at))
        elif not self.is_quiet:
            after = f" after {show_duration(waited_s)}" if has_waited else ""
            until = "" if ends_at is None else f" until {show_moment(ends_at, time())}"
            complain(f"{show_gpus(list(map(str, gpus)))} granted{after}{until}")

    def inside(self, assignment: Assignment) -> None:
        """The GPUs are those of the lease around this process."""
        if self.is_json:
            self.granted(assignment, 0.0, has_waited=False)
            return
        self._note_grant(assignment)
        if not self.is_quiet:
            gpus = show_gpus(list(map(str, assignment.gpu_ids)))
            complain(f"{gpus} of the lease {assignment.lease_id}, inside which this runs; --new asks for others")

    def waiting(self, endpoint: str | None, text: str, lease: LeaseView | None) -> None:
        """For --json only: the wait as the server describes it."""
        start = {} if lease is None else {name: getattr(lease, name) for name in _EXPECTED}
        position = None if lease is None else lease.position
        self._print("waiting", endpoint=endpoint, message=text, position=position, **dict.fromkeys(_EXPECTED) | start)

    def _note_grant(self, assignment: Assignment) -> None:
        self._is_granted = True
        if self._notices is not None:
            self._notices.set_lease(assignment)
            self._notices.granted()

    def ending(self, ending: LeaseEnding | None) -> None:
        """The server is about to end the lease, or, with None, no longer is."""
        if self._notices is not None:
            self._notices.ending(ending)
        if self.is_json:
            ends_at = None if ending is None else iso_time(ending.ends_at.timestamp())
            self._print("ending", reason=None if ending is None else ending.reason, ends_at=ends_at)
        elif ending is None:
            complain("the lease goes on: its end was withdrawn")
        else:
            complain(f"{coming_end(ending.reason, ending.ends_at)}; the command got SIGTERM")

    def stopped(self, reason: str, text: str) -> None:
        """The command was stopped because its lease ended as announced."""
        if self._notices is not None:
            self._notices.lost(reason, text)
        if self.is_json:
            self._print("stopped", reason=reason, message=text)
        else:
            complain(f"the command was stopped: {text}")

    def lost(self, reason: str) -> None:
        """The command is stopped because its lease is lost."""
        if self._notices is not None:
            self._notices.lost(None, reason)
        if self.is_json:
            self._print("lost", reason=reason)
        else:
            complain(f"the GPU is no longer yours ({reason}); the command is stopped")

    def failed(self, message: str) -> None:
        """For --json only: otherwise the failure itself is shown, as with every command."""
        if self.is_json:
            self._print("failed", message=message)

    def ended(self, exit_code: int, why: str | None = None) -> None:
        """`why` is set where gpu-pool itself failed."""
        if self._notices is not None and (self._is_granted or why is not None):
            self._notices.ended(exit_code, why=why)
        if self.is_json:
            self._print("ended", exit_code=exit_code)

    def _print(self, event: str, **facts: Any) -> None:
        line = {"schema": "gpu-pool/run/1", "event": event, **facts}
        tell(json.dumps(line))
