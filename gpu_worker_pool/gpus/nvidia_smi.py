"""Reads GPUs with the command `nvidia-smi`, for machines where NVML cannot be loaded.

It prints comma-separated values without quotes, prints words where a number is missing, and hangs when the driver does.
It ignores CUDA_VISIBLE_DEVICES: it always shows all GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, Reading
from gpu_worker_pool.host.processes import ProcessTable

from .probe import ProbeResult, ProbeUnavailable

_GPU_QUERY = (
    "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,temperature.gpu,power.draw,power.limit"
)
_PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
_FORMAT = "--format=csv,noheader,nounits"
_NUMERIC_FIELDS = 6

# SIGKILL takes effect at once, unless the process is stuck inside the driver.
_KILLED_WITHIN_S = 1.0
_LONGEST_QUOTE = 200


class NvidiaSmiProbe:
    """Reads GPUs with `nvidia-smi`. After `timeout_s` a run is stopped with all processes it started."""

    source = "nvidia-smi"

    def __init__(self, node: str, timeout_s: float = 10.0, command: str = "nvidia-smi") -> None:
        self._node = node
        self._command = _SmiCommand(_find(command), timeout_s)
        # The last GPU seen at each index: a lost GPU may not even report its UUID.
        self._known: dict[int, Gpu] = {}

    def read(self, at: float) -> ProbeResult:
        """Run it twice, for the GPUs and for their processes. If the second run fails, processes are unknown."""
        try:
            answer = self._command.run(_GPU_QUERY)
        except _NoAnswerError as failure:
            return ProbeResult((), str(failure))
        readings, unmatched = self._readings(answer.stdout, at)
        problems = _problems(answer, unmatched, found=len(readings))
        if readings and unmatched:
            readings += self._missing(readings, at, unmatched[0])
        if readings:
            self._known = {reading.gpu.index: reading.gpu for reading in readings}
            readings, strays = self._with_processes(readings)
            problems += strays
        return ProbeResult(tuple(sorted(readings, key=lambda reading: reading.gpu.index)), "; ".join(problems) or None)

    def close(self) -> None:
        """Do nothing: nothing is open between reads."""

    def _readings(self, output: str, at: float) -> tuple[list[Reading], list[str]]:
        rows, unmatched = _rows(output, _GpuLine.parse)
        readings: list[Reading] = []
        told = {row.uuid for row, _ in rows if row.uuid is not None}
        seen: set[GpuKey | int] = set()
        for row, line in rows:
            gpu = self._identify(row, told)
            if gpu is None or gpu.key in seen or gpu.index in seen:
                unmatched.append(line)
                continue
            seen |= {gpu.key, gpu.index}
            readings.append(row.reading(gpu, at))
        return readings, unmatched

    def _identify(self, row: _GpuLine, told: set[str]) -> Gpu | None:
        """The GPU of a row. A row without a UUID is the GPU known at its index, unless that GPU is elsewhere now."""
        known = self._known.get(row.index)
        if row.uuid is not None:
            name = row.name or (known.name if known and known.key.uuid == row.uuid else "unknown GPU")
            return Gpu(GpuKey(self._node, row.uuid), row.index, name)
        return known if known and known.key.uuid not in told else None

    def _missing(self, readings: list[Reading], at: float, line: str) -> list[Reading]:
        """Known GPUs that are missing while some line could not be matched: they are faulty, not removed."""
        keys, indices = {r.gpu.key for r in readings}, {r.gpu.index for r in readings}
        return [
            Reading(gpu, at, fault=f"nvidia-smi no longer shows this GPU, and says: {_quote(line)}")
            for gpu in self._known.values()
            if gpu.key not in keys and gpu.index not in indices
        ]

    def _with_processes(self, readings: list[Reading]) -> tuple[list[Reading], list[str]]:
        try:
            answer = self._command.run(_PROCESS_QUERY)
            answer.check_returncode()
        except (_NoAnswerError, subprocess.CalledProcessError):
            return readings, []
        rows, unmatched = _rows(answer.stdout, _ProcessLine.parse)
        table = ProcessTable()
        told: list[Reading] = []
        for reading in readings:
            of_gpu = [row for row, _ in rows if row.uuid == reading.gpu.key.uuid]
            # For a faulty GPU, no process means that it could not be asked, not that it is unused.
            is_told = bool(of_gpu) or not reading.fault
            told.append(replace(reading, processes=_processes(of_gpu, table)) if is_told else reading)
        uuids = {reading.gpu.key.uuid for reading in readings}
        unmatched += [line for row, line in rows if row.uuid not in uuids]
        return told, [_describe_unmatched(unmatched, "process")] if unmatched else []


@dataclass(frozen=True, slots=True)
class _GpuLine:
    """`0, GPU-…, NVIDIA A100, 81920, 4, 0, 33, 61.20, 400.00`; missing values are None."""

    index: int
    uuid: str | None
    name: str | None
    numbers: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> _GpuLine | None:
        # Only the name may hold commas: so two fields from the left, and the numbers from the right.
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 3 + _NUMERIC_FIELDS or not re.fullmatch("[0-9]{1,6}", fields[0]):
            return None
        name = ",".join(line.split(",")[2:-_NUMERIC_FIELDS])
        return cls(int(fields[0]), _text(fields[1]), _text(name), tuple(fields[-_NUMERIC_FIELDS:]))

    def reading(self, gpu: Gpu, at: float) -> Reading:
        total_mb, used_mb, utilization, temperature_c, draw_w, limit_w = (_number(text) for text in self.numbers)
        total_mb = _at_least_0(total_mb) or None
        if used_mb is not None and (used_mb < 0 or (total_mb is not None and used_mb > total_mb)):
            used_mb = None
        return Reading(
            gpu,
            at,
            memory_total_mb=total_mb,
            memory_used_mb=used_mb,
            utilization_percent=utilization if utilization is not None and 0 <= utilization <= 100 else None,
            temperature_c=temperature_c,
            power_draw_w=_at_least_0(draw_w),
            power_limit_w=_at_least_0(limit_w) or None,
            fault=self._fault(),
        )

    def _fault(self) -> str | None:
        """The fault of the GPU itself, as opposed to a value that it does not have."""
        for value in self.numbers:
            if re.search("is lost|requires reset|reset required|fallen off", value, re.IGNORECASE):
                return f"nvidia-smi says: {_quote(value)}"
        errors = [value for value in self.numbers if "error" in value.lower()]
        if errors and all(_number(value) is None for value in self.numbers):
            return f"nvidia-smi says: {_quote(errors[0])}"
        return None if self.uuid is not None else "nvidia-smi cannot read its UUID any more"


@dataclass(frozen=True, slots=True)
class _ProcessLine:
    """`GPU-…, 4711, 1024, python`; the name comes last, so it may hold commas."""

    uuid: str
    pid: int | None
    memory_mb: float | None
    name: str | None

    @classmethod
    def parse(cls, line: str) -> _ProcessLine | None:
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) < 4 or _text(fields[0]) is None:
            return None
        pid = int(fields[1]) if re.fullmatch("[0-9]{1,9}", fields[1]) else None
        return cls(fields[0], pid or None, _at_least_0(_number(fields[2])), _text(fields[3]))


_LineT = TypeVar("_LineT", _GpuLine, _ProcessLine)


def _rows(output: str, parse: Callable[[str], _LineT | None]) -> tuple[list[tuple[_LineT, str]], list[str]]:
    """The parsed rows with their lines, and the lines that could not be parsed."""
    lines = [line for line in output.split("\n") if line.strip()]
    parsed = [(parse(line), line) for line in lines]
    return [(row, line) for row, line in parsed if row is not None], [line for row, line in parsed if row is None]


def _processes(rows: list[_ProcessLine], table: ProcessTable) -> tuple[GpuProcess, ...] | None:
    """The processes of one GPU; None (unknown) if one of them has no readable pid."""
    found: dict[int, GpuProcess] = {}
    for row in rows:
        if row.pid is None:
            return None
        process = table.gpu_process(row.pid, row.memory_mb)
        process = process if process.name is not None else replace(process, name=row.name)
        if row.pid in found:  # listed once for each part of the GPU that it uses
            before_mb = found[row.pid].memory_mb
            both = None if before_mb is None or row.memory_mb is None else before_mb + row.memory_mb
            process = replace(process, memory_mb=both)
        found[row.pid] = process
    return tuple(found.values())


def _problems(answer: subprocess.CompletedProcess[str], unmatched: list[str], *, found: int) -> list[str]:
    exit_code = answer.returncode
    if exit_code != 0 or not found:
        said = [*unmatched, *(line for line in answer.stderr.split("\n") if line.strip())]
        if said:
            return [f"nvidia-smi: {_quote(said[0])}"]
        if exit_code != 0:
            ending = f"exit code {exit_code}" if exit_code > 0 else f"signal {-exit_code}"
            return [f"nvidia-smi failed with {ending} and printed nothing"]
        return ["nvidia-smi shows no GPU"]
    return [_describe_unmatched(unmatched, "GPU")] if unmatched else []


def _describe_unmatched(lines: list[str], what: str) -> str:
    number = f"{len(lines)} lines that belong" if len(lines) > 1 else "a line that belongs"
    return f"nvidia-smi printed {number} to no {what}: {_quote(lines[0])}"


def _quote(line: str) -> str:
    """Make foreign text safe to show: one line, printable, not too long."""
    text = "".join(character if character.isprintable() else "?" for character in line.strip(" \t\r\n[]"))
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def _text(field: str) -> str | None:
    """A word; None if nvidia-smi says in brackets why there is none."""
    text = field.strip()
    return None if not text or text.upper() == "N/A" or (text[0] == "[" and text[-1] == "]") else text


def _number(field: str) -> float | None:
    """A plain decimal number; anything else ("[N/A]", "[Not Supported]", "nan", "12 MiB", "") is unknown."""
    return float(field) if re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{1,12})?", field) else None


def _at_least_0(number: float | None) -> float | None:
    return None if number is None or number < 0 else number


class _NoAnswerError(Exception):
    """The command could not be run, or was stopped."""


class _SmiCommand:
    """The command. It does not run again while an earlier run cannot be killed: they would pile up."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[str] | None = None

    def run(self, query: str) -> subprocess.CompletedProcess[str]:
        """Run it and return what it printed; raises _NoAnswerError."""
        if self._stuck is not None and self._stuck.poll() is None:
            raise _NoAnswerError(_describe_stuck(self._stuck))
        self._stuck = None
        try:
            process = subprocess.Popen(  # noqa: S603 - the operator's own nvidia-smi, without foreign text
                [self._path, query, _FORMAT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise _NoAnswerError(f"nvidia-smi could not be run: {error.strerror or error} ({self._path})") from error
        try:
            output, errors = process.communicate(timeout=self._timeout_s)
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also if the read itself is interrupted: no process is left running.
            is_over = _stop(process)
        if not is_over:
            self._stuck = process
            raise _NoAnswerError(_describe_stuck(process))
        raise _NoAnswerError(f"nvidia-smi did not answer within {self._timeout_s:g} s and was stopped")


def _stop(process: subprocess.Popen[str]) -> bool:
    """Kill it with all processes it started, unless it has ended, and close its pipes; return whether it has ended."""
    # Until it is waited for, its pid cannot be reused, so the process group is its own.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_KILLED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _describe_stuck(process: subprocess.Popen[str]) -> str:
    return (
        f"nvidia-smi (pid {process.pid}) did not answer and cannot be killed: it hangs in the NVIDIA driver. It is not "
        "run again until that one is gone; the machine may have to be rebooted"
    )


def _find(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise ProbeUnavailable(
            f"{command} was not found{'' if os.sep in command else ' on the PATH'}, or this user may not run it: install the "
            "NVIDIA driver, which brings it, or add its folder to the PATH"
        )
    return path
