"""What was submitted: one command with what it asks for, or an array of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpu_worker_pool.wire.reader import read

from .job_key import JobKey, parse_key
from .life import AfterFailure, JobTerms

SCHEMA: Final = "gpu-pool/job/2"
# Stands for the index of a task in the words of its command.
INDEX_WORD: Final = "{index}"
JOB_ID_VARIABLE: Final = "GPU_POOL_JOB_ID"
ARRAY_ID_VARIABLE: Final = "GPU_POOL_ARRAY_ID"
ARRAY_INDEX_VARIABLE: Final = "GPU_POOL_ARRAY_INDEX"
BATCH_LINE_VARIABLE: Final = "GPU_POOL_BATCH_LINE"
# How often a job was run before: 0 the first time.
RESTART_VARIABLE: Final = "GPU_POOL_RESTART"
_SHELL: Final = "/bin/sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """A batch: the lines of its file, by their numbers as the indices of the array; where their logs go, and the process that
    follows it. When that process is gone, what is left of the batch is cancelled.
    """

    lines: tuple[str, ...]
    logs: tuple[str, ...]
    pid: int
    pid_started: float | None = None
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A submission, as it is written to its folder. Its environment is in a file of its own.

    `label` is what others see of it. `array` has the indices of an array's tasks; None: it is one job. `endpoints` are the
    servers whose GPUs it can use (None: the default one), several names for them where it `is_multi`; `among` are the UUIDs
    of the GPUs that may be granted (None: all).
    """

    submitted_at: float
    command: tuple[str, ...]
    label: str
    name: str | None = None
    cwd: str
    umask: int = 0o022
    gpus: int = 1
    memory_mb: float | None = None
    model: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    time_limit_s: float | None = None
    is_preemptible: bool = False
    grace_s: float = 10.0
    is_remote: bool = False
    nodes: int = 1
    uses_ssh: bool = False
    env_names: tuple[str, ...] = ()
    endpoints: tuple[str, ...] | None = None
    is_multi: bool = False
    among: tuple[str, ...] | None = None
    after: tuple[str, ...] = ()
    after_failure: AfterFailure = AfterFailure.SKIP
    array: tuple[int, ...] | None = None
    at_once: int | None = None
    retries: int = 0
    stops_on_failure: bool = False
    log_limit_bytes: int | None = None
    on_granted: str | None = None
    notify: tuple[str, ...] = ()
    batch: BatchFacts | None = None

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: object) -> JobSpec:
        """Read what `as_json` wrote; a ValueError says what is wrong with it."""
        found = read(cls, data) if isinstance(data, dict) and data.get("schema") == SCHEMA else None
        if found is None or not found.command:
            raise ValueError(f"it is not a job of {SCHEMA}")
        return found

    def keys(self, number: int) -> list[JobKey]:
        return [JobKey(number, index) for index in self.indices]

    @property
    def indices(self) -> tuple[int | None, ...]:
        return (None,) if self.array is None else self.array

    def place_of(self, index: int) -> int:
        """Where the line with this number is in a batch."""
        return bisect_left(self.array or (), index)

    def terms(self, number: int) -> JobTerms:
        after = tuple(parse_key(text) for text in self.after)
        return JobTerms(
            number,
            self.indices,
            self.priority,
            self.retries,
            after,
            self.after_failure,
            self.at_once,
            self.stops_on_failure,
        )

    def command_of(self, index: int | None) -> list[str]:
        """The words of one task's command."""
        if index is None:
            return list(self.command)
        if self.batch is not None:
            return [_SHELL, "-c", self.batch.lines[self.place_of(index)]]
        return [word.replace(INDEX_WORD, str(index)) for word in self.command]

    def asks_like(self, other: JobSpec) -> bool:
        """Whether a server sees the same request in both. One with a limit to its wait is like no other."""
        one, two = (
            (spec.label, spec.gpus, spec.memory_mb, spec.model, spec.priority, spec.time_limit_s, spec.is_preemptible)
            for spec in (self, other)
        )
        return one == two and self.timeout_s is None is other.timeout_s and self.nodes == other.nodes == 1

    def gang_command(self, index: int | None, program: Sequence[str]) -> list[str]:
        """The words of `gpu-pool run` for a job on several boxes; `program` is gpu-pool."""
        given: dict[str, object | None] = {
            "--nodes": self.nodes,
            "--gpus": self.gpus,
            "--memory": self.memory_mb,
            "--model": self.model,
            "--priority": self.priority,
            "--timeout": self.timeout_s,
            "--time": self.time_limit_s,
            "--grace": self.grace_s,
            "--name": self.label,
            "--on-granted": self.on_granted,
        }
        flags = {"--preemptible": self.is_preemptible, "--remote": self.is_remote, "--ssh": self.uses_ssh}
        words = [f"{option}={value}" for option, value in given.items() if value is not None]
        words += [option for option, is_set in flags.items() if is_set]
        words += [f"--env={name}" for name in self.env_names]
        words += [f"--notify={where}" for where in self.notify]
        words += [f"--endpoint={url}" for url in self.endpoints or ()]
        return [*program, "run", *words, "--", *self.command_of(index)]

    def variables(self, key: JobKey, restarts: int) -> Mapping[str, str]:
        """What the command finds in its environment, beside what `run` gives it."""
        found = {JOB_ID_VARIABLE: str(key), RESTART_VARIABLE: str(restarts)}
        if key.index is not None:
            found |= {ARRAY_ID_VARIABLE: str(key.number), ARRAY_INDEX_VARIABLE: str(key.index)}
        if self.batch is not None:
            found[BATCH_LINE_VARIABLE] = str(key.index)
        return found
