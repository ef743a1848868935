"""What was submitted: one command with what it asks for, or an array of them; and the names of jobs.

A job is called `12`, and `12_3` if it is task 3 of the array 12. `--array` gives the indices: `0-9`, `1,5,7-9`, `0-100:10`, and `0-99%4`
for at most four at once.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Stands for the index of a task in the words of its command.
INDEX_WORD: Final = "{index}"
JOB_ID_VARIABLE: Final = "GPU_POOL_JOB_ID"
ARRAY_ID_VARIABLE: Final = "GPU_POOL_ARRAY_ID"
ARRAY_INDEX_VARIABLE: Final = "GPU_POOL_ARRAY_INDEX"
BATCH_LINE_VARIABLE: Final = "GPU_POOL_BATCH_LINE"
# How often a job was run before: 0 the first time.
RESTART_VARIABLE: Final = "GPU_POOL_RESTART"
# What belongs to a lease or a job around a process, and not to what outlives it.
_OF_A_LEASE: Final = (
    "GPU_POOL_LEASE_",
    "GPU_POOL_GUARD",
    JOB_ID_VARIABLE,
    "GPU_POOL_ARRAY_",
    RESTART_VARIABLE,
    BATCH_LINE_VARIABLE,
)
_SHELL: Final = "/bin/sh"
MOST_TASKS: Final = 10_000
_ADVICE: Final = "write 0-9, 1,5,7-9, 0-100:10 (in steps of 10) or 0-99%4 (at most 4 at once)"
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_KEY: Final = re.compile(r"([1-9][0-9]{0,8})(?:_([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    """A job: the number of its submission, and its index where that is an array."""

    number: int
    index: int | None = None

    def __str__(self) -> str:
        return str(self.number) if self.index is None else f"{self.number}_{self.index}"


def parse_key(text: str) -> JobKey:
    """Read `12` or `12_3`; a ValueError says what was expected."""
    found = _KEY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not the id of a job; an id is 12, or 12_3 for a task of an array")
    return JobKey(int(found[1]), None if found[2] is None else int(found[2]))


@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """The indices in the order in which the tasks are run; at most `at_once` of them wait or run at a time."""

    indices: tuple[int, ...]
    at_once: int | None = None


def parse_array(text: str) -> ArrayTasks:
    """Read what `--array` says; a ValueError says what is wrong with it."""
    spans, percent, limit = text.strip().partition("%")
    if percent and not (limit.isascii() and limit.isdigit() and int(limit) >= 1):
        raise ValueError(f"{text!r} is not an array: after % comes how many may run at once, 1 or more; {_ADVICE}")
    indices: dict[int, None] = {}
    for part in spans.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is not an array: {part.strip()!r} is not an index or a span; {_ADVICE}")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"{text!r} is not an array: {part.strip()!r} has no index in it; {_ADVICE}")
        if len(indices) + (last - first) // step + 1 > MOST_TASKS:
            raise ValueError(f"{text!r} has too many tasks; there must be at most {MOST_TASKS}")
        indices.update(dict.fromkeys(range(first, last + 1, step)))
    return ArrayTasks(tuple(indices), int(limit) if percent else None)


class AfterFailure(StrEnum):
    """What becomes of a job if a job that it comes after has not ended well."""

    SKIP = "skip"
    RUN = "run"
    WAIT = "wait"


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

    `label` is what others see of it. `array` has the indices of an array's tasks; None: it is one job. `endpoints` are those of
    --endpoint; None: those of its environment, or the default one. A batch that `is_inside` a lease runs its lines itself.
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
    # The only GPUs that it may have, as the user named them; None: any.
    gpu_names: tuple[str, ...] | None = None
    min_memory_mb: float | None = None
    # The GPUs that it may not have.
    exclude: tuple[str, ...] | None = None
    priority: int = 0
    timeout_s: float | None = None
    time_limit_s: float | None = None
    is_preemptible: bool = False
    grace_s: float = 10.0
    is_remote: bool = False
    is_anywhere: bool = False
    nodes: int = 1
    uses_ssh: bool = False
    env_names: tuple[str, ...] = ()
    endpoints: tuple[str, ...] | None = None
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
    is_inside: bool = False
    # No GPUs are requested before this time.
    begin_at: float | None = None
    # Whether it is run again when its time limit has ended it.
    is_requeued: bool = False

    def keys(self, number: int) -> list[JobKey]:
        return [JobKey(number, index) for index in self.indices]

    @property
    def indices(self) -> tuple[int | None, ...]:
        return (None,) if self.array is None else self.array

    def place_of(self, index: int) -> int:
        """Where the line with this number is in a batch."""
        return bisect_left(self.array or (), index)

    @property
    def after_keys(self) -> tuple[JobKey, ...]:
        return tuple(map(parse_key, self.after))

    def command_of(self, index: int | None) -> list[str]:
        """The words of one task's command."""
        if index is None:
            return list(self.command)
        if self.batch is not None:
            return [_SHELL, "-c", self.batch.lines[self.place_of(index)]]
        return [word.replace(INDEX_WORD, str(index)) for word in self.command]

    @property
    def runs_itself(self) -> bool:
        """Whether its command is a `gpu-pool run`, which requests GPUs of other boxes itself."""
        return self.nodes > 1 or self.is_anywhere

    def command_of_run(self, index: int | None, program: Sequence[str]) -> list[str]:
        """The words of `gpu-pool run` for a job on other boxes; `program` is gpu-pool."""
        given: dict[str, object | None] = {
            "--nodes": self.nodes,
            "--gpus": self.gpus,
            "--memory": self.memory_mb,
            "--model": self.model,
            "--min-memory": self.min_memory_mb,
            "--exclude": ",".join(self.exclude) if self.exclude else None,
            "--priority": self.priority,
            "--timeout": self.timeout_s,
            "--time": self.time_limit_s,
            "--grace": self.grace_s,
            "--name": self.label,
            "--on-granted": self.on_granted,
        }
        flags = {"--preemptible": self.is_preemptible, "--remote": self.is_remote, "--ssh": self.uses_ssh}
        flags["--anywhere"] = self.is_anywhere
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


def without_lease(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to a lease or a job around this process."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_A_LEASE)}
