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
from dataclasses import replace

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, Reading
from gpu_worker_pool.host.processes import ProcessTable

from .probe import Probe, ProbeResult, ProbeUnavailable

_GPU_QUERY = (
    "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,temperature.gpu,power.draw,power.limit"
)
_PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
_FORMAT = "--format=csv,noheader,nounits"
_NUMERIC_FIELDS = 6

# SIGKILL takes effect at once, unless the process is stuck inside the driver.
_KILLED_WITHIN_S = 1.0
_LONGEST_QUOTE = 200


class NvidiaSmiProbe(Probe):
    """Reads GPUs with `nvidia-smi`. After `timeout_s` a run is stopped with all processes it started."""

    source = "nvidia-smi"

    def __init__(self, node: str, timeout_s: float = 10.0, command: str = "nvidia-smi") -> None:
        self._node = node
        self._command = _SmiCommand(_find(command), timeout_s)
        self._known: dict[str, Gpu] = {}

    def read(self, at: float) -> ProbeResult:
        """Run it twice, for the GPUs and for their processes. If the second run fails, processes are unknown."""
        try:
            answer = self._command.run(_GPU_QUERY)
        except _NoAnswerError as failure:
            return ProbeResult((), str(failure))
        readings: dict[str, Reading] = {}
        indices, unmatched = set[int](), []
        for line in _lines(answer.stdout):
            reading = _reading(line, self._node, at)
            if reading is None or reading.gpu.key.uuid in readings or reading.gpu.index in indices:
                unmatched.append(line)
            else:
                readings[reading.gpu.key.uuid] = reading
                indices.add(reading.gpu.index)
        problems = _problems(answer, unmatched, found=len(readings))
        if readings and unmatched:
            # Known GPUs that are missing now are faulty, and not removed: a lost GPU may not even report its UUID.
            fault = f"nvidia-smi no longer shows this GPU, and says: {_quote(unmatched[0])}"
            for uuid in self._known.keys() - readings.keys():
                if self._known[uuid].index not in indices:
                    readings[uuid] = Reading(self._known[uuid], at, fault=fault)
        if readings:
            self._known = {uuid: reading.gpu for uuid, reading in readings.items()}
            problems += self._add_processes(readings)
        in_order = sorted(readings.values(), key=lambda reading: reading.gpu.index)
        return ProbeResult(tuple(in_order), "; ".join(problems) or None)

    def close(self) -> None:
        """Do nothing: nothing is open between reads."""

    def _add_processes(self, readings: dict[str, Reading]) -> list[str]:
        """Add their processes to the readings; what was wrong."""
        try:
            answer = self._command.run(_PROCESS_QUERY)
            answer.check_returncode()
        except (_NoAnswerError, subprocess.CalledProcessError):
            return []
        table, unmatched = ProcessTable(), []
        on_gpu: dict[str, dict[int, GpuProcess] | None] = {uuid: {} for uuid in readings}
        for line in _lines(answer.stdout):
            # `GPU-…, 4711, 1024, python`; the name comes last, so it may hold commas.
            uuid, pid, memory_mb, name = [*(field.strip() for field in line.split(",", 3)), "", "", ""][:4]
            if uuid not in readings or line.count(",") < 3:
                unmatched.append(line)
            elif not re.fullmatch("0*[1-9][0-9]{0,8}", pid):
                on_gpu[uuid] = None  # one of them is unknown
            elif (found := on_gpu[uuid]) is not None:
                process = table.gpu_process(int(pid), _at_least_0(_number(memory_mb)))
                if (before := found.get(int(pid))) is not None:  # listed once for each part of the GPU that it uses
                    both = (before.memory_mb, process.memory_mb)
                    process = replace(process, memory_mb=None if None in both else sum(mb or 0.0 for mb in both))
                found[int(pid)] = process if process.name is not None else replace(process, name=_text(name))
        for uuid, found in on_gpu.items():
            # For a faulty GPU, no process means that it could not be asked, not that it is unused.
            if found or (found is not None and readings[uuid].fault is None):
                readings[uuid] = replace(readings[uuid], processes=tuple(found.values()))
        return [_describe_unmatched(unmatched, "process")] if unmatched else []


def _lines(output: str) -> list[str]:
    return [line for line in output.split("\n") if line.strip()]


def _reading(line: str, node: str, at: float) -> Reading | None:
    """That of `0, GPU-…, NVIDIA A100, 81920, 4, 0, 33, 61.20, 400.00`; None where it names no GPU."""
    # Only the name may hold commas: so two fields from the left, and the numbers from the right.
    fields = [field.strip() for field in line.split(",")]
    if len(fields) < 3 + _NUMERIC_FIELDS or not re.fullmatch("[0-9]{1,6}", fields[0]) or _text(fields[1]) is None:
        return None
    name = _text(",".join(line.split(",")[2:-_NUMERIC_FIELDS])) or "unknown GPU"
    texts = fields[-_NUMERIC_FIELDS:]
    total_mb, used_mb, utilization, temperature_c, draw_w, limit_w = numbers = [_number(text) for text in texts]
    total_mb = _at_least_0(total_mb) or None
    is_too_much = used_mb is not None and total_mb is not None and used_mb > total_mb
    # The fault of the GPU itself, as opposed to a value that it does not have.
    said = [
        text for text in texts if re.search("is lost|requires reset|reset required|fallen off", text, re.IGNORECASE)
    ]
    if numbers == [None] * _NUMERIC_FIELDS:
        said += [text for text in texts if "error" in text.lower()]
    return Reading(
        Gpu(GpuKey(node, fields[1]), int(fields[0]), name),
        at,
        memory_total_mb=total_mb,
        memory_used_mb=None if is_too_much else _at_least_0(used_mb),
        utilization_percent=utilization if utilization is not None and 0 <= utilization <= 100 else None,
        temperature_c=temperature_c,
        power_draw_w=_at_least_0(draw_w),
        power_limit_w=_at_least_0(limit_w) or None,
        fault=f"nvidia-smi says: {_quote(said[0])}" if said else None,
    )


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
