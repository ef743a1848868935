"""The logs of jobs: one for each attempt, or one for all attempts at a line of a batch; where it is asked for, of limited size."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from gpu_worker_pool.failure import Failure

from .job_record import JobRecord
from .submission import JobTask

_READ_BYTES: Final = 65536


@asynccontextmanager
async def opened_log(record: JobRecord, task: JobTask, gpu_ids: Sequence[int | str]) -> AsyncIterator[int]:
    """The log of this attempt, for its command to write to; Failure where it cannot be written. FileExistsError where there is
    one already: the journal has lost events, and the job may run.
    """
    spec, path = record.spec, record.log_of(task.index, task.attempts)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if spec.batch is None else 0)
    try:
        descriptor = os.open(path, flags, 0o600 if spec.batch is None else 0o666)
        try:
            if spec.batch is not None:
                when, line = time.strftime("%Y-%m-%d %H:%M:%S"), spec.command_of(task.index)[-1]
                gpus = ", ".join(map(str, gpu_ids))
                os.write(descriptor, f"# {when} attempt {task.attempts} on GPU {gpus}: {line}\n".encode())
        except OSError:
            os.close(descriptor)
            raise
    except FileExistsError:
        raise
    except OSError as error:
        raise Failure(f"its log {path} cannot be written: {error.strerror}") from None
    try:
        if spec.log_limit_bytes is None:
            yield descriptor
        else:
            async with limited_log(path, spec.log_limit_bytes) as pipe:
                yield pipe
    finally:
        os.close(descriptor)


@asynccontextmanager
async def limited_log(path: Path, limit_bytes: int) -> AsyncIterator[int]:
    """A descriptor for the output of a command, of which at most the last `limit_bytes` are kept, in two files: when one is
    half of that, it becomes `PATH.old`. All that was written is in the log when the block is left.
    """
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - few jobs have such a log

    log = RotatingFileHandler(path, maxBytes=max(limit_bytes // 2, 1), backupCount=1, encoding="latin-1")
    log.terminator, log.namer = "", lambda name: f"{name.removesuffix('.1')}.old"
    # A full disk, or a folder that was removed, must not end the command.
    log.handleError = lambda _: None  # type: ignore[method-assign, assignment]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)

    def copy() -> bool:
        """Copy some of the output; False where there is none now."""
        with suppress(BlockingIOError):
            if data := os.read(reading, _READ_BYTES):
                log.handle(logging.makeLogRecord({"msg": data.decode("latin-1")}))
                return True
            loop.remove_reader(reading)
        return False

    loop = asyncio.get_running_loop()
    loop.add_reader(reading, copy)
    try:
        yield writing
    finally:
        loop.remove_reader(reading)
        os.close(writing)
        while copy():
            pass
        os.close(reading)
        log.close()
