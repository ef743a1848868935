"""The access log has a line for each call, in order with all other records, in the format of the log."""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Iterator

import pytest

from gpu_worker_pool.server.access_log import MOST_LINES, AccessLogHandler, call_logger
from gpu_worker_pool.server.logs import JsonFormatter
from gpu_worker_pool.testing import ServerProcess

SOON_S = 30.0
ASKED = ("127.0.0.1:5", "GET", "/gpu/count", "1.1", 200)
LINE = '127.0.0.1:5 - "GET /gpu/count HTTP/1.1" 200'


@pytest.fixture
def access() -> Iterator[logging.Logger]:
    """The logger of calls without its filters. Each test sets the handlers: pytest adds some before it."""
    logger = logging.getLogger("uvicorn.access")
    kept = logger.handlers, logger.filters, logger.level, logger.propagate
    logger.filters, logger.propagate = [], False
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers, logger.filters, level, logger.propagate = kept
    logger.setLevel(level)


async def test_lines_of_calls_are_written_before_the_record_after_them(access: logging.Logger) -> None:
    written = io.StringIO()
    access.handlers = [AccessLogHandler(written)]
    log_call = call_logger(access)
    log_call(*ASKED)
    log_call(*ASKED)
    assert written.getvalue() == ""
    access.warning("another record")
    assert written.getvalue().splitlines() == [LINE, LINE, "another record"]


async def test_a_line_has_the_format_and_the_fields_of_any_other_record(access: logging.Logger) -> None:
    written = io.StringIO()
    handler = AccessLogHandler(written)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(relativeCreated)d %(message)s"))
    access.handlers = [handler]
    call_logger(access)(*ASKED)
    access.info(LINE)
    first, second = (line.split(maxsplit=5) for line in written.getvalue().splitlines())
    assert (first[0], first[2:4], first[5]) == (second[0], second[2:4], second[5])
    assert float(first[4]) <= float(second[4])
    assert len(first[1]) == len(second[1])
    handler.setFormatter(JsonFormatter())
    call_logger(access)(*ASKED)
    handler.flush()
    assert '"logger": "uvicorn.access"' in written.getvalue()


async def test_not_more_than_so_many_lines_wait(access: logging.Logger) -> None:
    written = io.StringIO()
    access.handlers = [AccessLogHandler(written)]
    for _ in range(MOST_LINES):
        call_logger(access)(*ASKED)
    assert written.getvalue().splitlines() == [LINE] * MOST_LINES


async def test_the_filters_of_the_logger_are_asked(access: logging.Logger) -> None:
    handler = AccessLogHandler(io.StringIO())
    access.handlers = [handler]
    access.addFilter(lambda record: record.args != ASKED)
    call_logger(access)(*ASKED)
    handler.flush()
    assert handler.stream.getvalue() == ""  # type: ignore[attr-defined]


async def test_handlers_of_another_program_get_a_record_for_each_call(access: logging.Logger) -> None:
    written = io.StringIO()
    access.handlers = [logging.StreamHandler(written)]
    call_logger(access)(*ASKED)
    assert written.getvalue() == f"{LINE}\n"


def test_a_server_that_is_stopped_has_logged_all_its_calls() -> None:
    poll = b"GET /gpu/count HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ServerProcess() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as connection:
            for _ in range(20):
                connection.sendall(poll)
                while not connection.recv(65536).endswith(b"}"):
                    pass
            client = f"127.0.0.1:{connection.getsockname()[1]}"
            server.stop()
        lines = [line for line in server.log().splitlines() if client in line]
    assert len(lines) == 20
    assert all(line.endswith(f' - uvicorn.access - INFO - {client} - "GET /gpu/count HTTP/1.1" 200') for line in lines)
