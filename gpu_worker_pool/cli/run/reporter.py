"""The messages of `run`, as sentences or JSON lines. They go to standard error, because the output is the command's."""

from __future__ import annotations

import json
import sys
from typing import Any

from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.client.pool_client import Assignment


class RunReporter:
    """Reports each event as a JSON line, or as a sentence if it matters to a person; `is_quiet`: losses and warnings."""

    def __init__(self, *, is_json: bool, is_quiet: bool) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet

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
        gpus = list(assignment.gpu_ids)
        if self.is_json:
            self._print("granted", gpus=gpus, lease_id=assignment.lease_id, waited_s=round(waited_s, 3))
        elif not self.is_quiet:
            after = f" after {show_duration(waited_s)}" if has_waited else ""
            complain(f"GPU {', '.join(map(str, gpus))} granted{after}")

    def lost(self, reason: str, *, is_stopped: bool) -> None:
        if self.is_json:
            self._print("lost", reason=reason, is_stopped=is_stopped)
            return
        what = "is stopped (--on-lost finish would let it go on)" if is_stopped else "goes on (--on-lost finish)"
        complain(f"the GPU is no longer ours ({reason}); the command {what}")

    def failed(self, message: str) -> None:
        """For --json only: otherwise the failure itself is shown, as with every command."""
        if self.is_json:
            self._print("failed", message=message)

    def ended(self, exit_code: int) -> None:
        if self.is_json:
            self._print("ended", exit_code=exit_code)

    def _print(self, event: str, **facts: Any) -> None:
        line = {"schema": "gpu-pool/run/1", "event": event, **facts}
        print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201 - what the option is for
