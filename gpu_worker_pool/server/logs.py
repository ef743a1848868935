"""Log formats: text lines, or JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TextIO

from .settings import DEFAULT_LOG_FORMAT, ServerSettings

ACCESS_LOG = "uvicorn.access"
ACCESS_S = 0.05


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error. The lines of the access log are written together, after ACCESS_S at the latest: to write each alone
    takes a tenth of a lease. All other records are written at once, after the lines that wait.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(f"{self.format(record)}{self.terminator}")
            if record.name != ACCESS_LOG:
                self.flush()
            elif len(self._lines) == 1:
                asyncio.get_running_loop().call_later(ACCESS_S, self.flush)
        except Exception:  # noqa: BLE001 - as every handler: a record that cannot be written harms no caller
            self.handleError(record)

    def flush(self) -> None:
        """Write the lines that wait. The end of the process calls this, too."""
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("".join(lines))
            super().flush()


class PagePollFilter(logging.Filter):
    """Drops from the access log the successful polls of open pages, one a second each; failures stay."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._path = f"{prefix}/ui/data/"

    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case (_, "GET", str(path), _, 200):
                return not path.startswith(self._path)
        return True


def make_formatter(log_format: str) -> logging.Formatter:
    """Make the formatter for LOG_FORMAT; an invalid one is logged and replaced by the default."""
    if log_format.strip().lower() == "json":
        return JsonFormatter()
    try:
        formatter = logging.Formatter(log_format)
        formatter.format(logging.makeLogRecord({"msg": "", "levelname": "INFO"}))
    except (ValueError, KeyError, TypeError):
        logging.getLogger(__name__).error("LOG_FORMAT=%r is not usable; using the default", log_format)  # noqa: TRY400
        return logging.Formatter(DEFAULT_LOG_FORMAT)
    return formatter


def configure_logging_if_unset(settings: ServerSettings) -> None:
    """Configure the application's own logs if another program's uvicorn runs it; uvicorn's logs stay as they are."""
    logging.getLogger(ACCESS_LOG).addFilter(PagePollFilter(settings.api_prefix))
    if not logging.getLogger("uvicorn").handlers:
        configure_logging(settings)
    elif not logging.getLogger("gpu_worker_pool").hasHandlers():
        _send(settings, "gpu_worker_pool")


def _send(settings: ServerSettings, name: str) -> None:
    handler = LogHandler()
    handler.setFormatter(make_formatter(settings.log_format))
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(settings.log_level.upper())
    logger.propagate = False


def configure_logging(settings: ServerSettings) -> None:
    """Log our own records and uvicorn's to standard error in one format."""
    for name in ("gpu_worker_pool", "uvicorn"):
        _send(settings, name)
    for name in ("uvicorn.error", ACCESS_LOG):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
