"""What was submitted: one command with what it asks for, or an array of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpu_worker_pool.cli.run.notices import JOB_ID_VARIABLE
from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.life import AfterFailure, JobTerms
from gpu_worker_pool.wire.reader import read

SCHEMA: Final = "gpu-pool/job/1"
# Stands for the index of a task in the words of its command.
INDEX_WORD: Final = "{index}"
ARRAY_ID_VARIABLE: Final = "GPU_POOL_ARRAY_ID"
ARRAY_INDEX_VARIABLE: Final = "GPU_POOL_ARRAY_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A submission, as it is written to its folder. Its environment is in a file of its own.

    `label` is what others see of it. `array` has the indices of an array's tasks; None: it is one job.
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
    after: tuple[str, ...] = ()
    after_failure: AfterFailure = AfterFailure.SKIP
    array: tuple[int, ...] | None = None
    at_once: int | None = None
    retries: int = 0
    log_limit_bytes: int | None = None
    on_granted: str | None = None
    notify: tuple[str, ...] = ()

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
        return [JobKey(number, index) for index in (self.array if self.array is not None else (None,))]

    def terms(self, key: JobKey) -> JobTerms:
        after = tuple(parse_key(text) for text in self.after)
        return JobTerms(key, self.priority, self.retries, after, self.after_failure, self.at_once)

    def command_of(self, key: JobKey) -> list[str]:
        """The words of one job's command."""
        if key.index is None:
            return list(self.command)
        return [word.replace(INDEX_WORD, str(key.index)) for word in self.command]

    def asks_like(self, other: JobSpec) -> bool:
        """Whether a server sees the same request in both. One with a limit to its wait is like no other."""
        one, two = (
            (spec.label, spec.gpus, spec.memory_mb, spec.model, spec.priority, spec.time_limit_s, spec.is_preemptible)
            for spec in (self, other)
        )
        return one == two and self.timeout_s is None is other.timeout_s and self.nodes == other.nodes == 1

    def gang_command(self, key: JobKey, program: Sequence[str]) -> list[str]:
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
        return [*program, "run", *words, "--", *self.command_of(key)]

    def variables(self, key: JobKey) -> Mapping[str, str]:
        """What the command finds in its environment, beside what `run` gives it."""
        array = {ARRAY_ID_VARIABLE: str(key.number), ARRAY_INDEX_VARIABLE: str(key.index)}
        return {JOB_ID_VARIABLE: str(key), **(array if key.index is not None else {})}
