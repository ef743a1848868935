"""The lines of the access log, written together: a write for each line would take longer than the call itself.

A line waits for at most WAIT_S. Any other record of the log is written at once, after the lines that wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

WAIT_S = 0.05
# So many lines are written without waiting.
MOST_LINES = 1000
# uvicorn's line: client, method, path, version of HTTP, status.
LINE = '%s - "%s %s HTTP/%s" %d'

LogCall = Callable[[str, str, str, str, int], None]


class AccessLogHandler(logging.StreamHandler[TextIO]):
    """Writes the records of all loggers to a stream, and the lines of calls that it is given by `log_call`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._logger = logging.getLogger("uvicorn.access")
        # Made once: to make a record for each call takes longer than to format one.
        self._record = self._logger.makeRecord(self._logger.name, logging.INFO, "", 0, LINE, (), None)
        self._started = self._record.created - self._record.relativeCreated / 1000
        self._lines: list[str] = []

    def log_call(self, *asked: str | int) -> None:
        """Log a call, in the event loop. The arguments are those of LINE."""
        record, now = self._record, time.time()
        record.args, record.created, record.msecs = asked, now, float(int(now % 1 * 1000))
        record.relativeCreated = 1000 * (now - self._started)
        if not self._logger.filter(record):
            return
        self._lines.append(f"{self.format(record)}{self.terminator}")
        waiting = len(self._lines)
        if waiting == 1:
            asyncio.get_running_loop().call_later(WAIT_S, self.flush)
        elif waiting >= MOST_LINES:
            self.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.flush()
        super().emit(record)

    def flush(self) -> None:
        """Write the lines that wait, in any thread. `logging.shutdown` calls it at the end of the process."""
        self.acquire()
        try:
            # Not a new list: the event loop may add a line to this one at any time.
            number = len(self._lines)
            lines = self._lines[:number]
            del self._lines[:number]
            if lines:
                self.stream.write("".join(lines))
            super().flush()
        except Exception:  # noqa: BLE001 - as for every other record
            self.handleError(self._record)
        finally:
            self.release()


def call_logger(access: logging.Logger) -> LogCall:
    """Return the function that logs calls. Handlers of another program get an ordinary record for each call."""
    handlers, logger = list(access.handlers), access
    while logger.propagate and logger.parent is not None:
        logger = logger.parent
        handlers += logger.handlers
    match handlers:
        case [AccessLogHandler() as own] if access.isEnabledFor(logging.INFO):
            return own.log_call
    return partial(access.info, LINE)
