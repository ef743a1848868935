"""Which of the hosts in a URL to use: the one that can be written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from gpu_worker_pool.ledger.journal import JournalError

from .faults import ASYNCPG_ERRORS, as_journal_error, is_worth_another_host
from .url import DatabaseUrl

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
# Once one host has answered, the others have so long: the first may be an old primary.
OTHERS_S = 0.5

RawConnection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Attempt: TypeAlias = "asyncio.Task[RawConnection]"

# How often the server, or one that it is a copy of, was promoted.
TIMELINE = "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint"


async def connect(url: DatabaseUrl) -> RawConnection:
    """Connect to the host that can be written, or to any if the URL says so. All are asked at once: one that is silent must
    not keep the others waiting.
    """
    attempts = [asyncio.create_task(_connect(one_host, url)) for one_host in url.by_host]
    chosen: RawConnection | None = None
    try:
        waiting: set[Attempt] = set(attempts)
        while waiting and not _connected(attempts):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=OTHERS_S)
        found = _connected(attempts)
        if not found:
            raise as_journal_error(_telling(attempts), url)
        chosen = found[0] if len(found) == 1 or url.has_target else await _promoted_last(found, url)
    finally:
        for attempt in attempts:
            attempt.add_done_callback(lambda done: _leave(done, chosen))
            attempt.cancel()
    return chosen


async def _connect(one_host: str, url: DatabaseUrl) -> RawConnection:
    return await asyncpg.connect(
        one_host,
        timeout=url.connect_timeout_s or CONNECT_TIMEOUT_S,
        statement_cache_size=100 if url.has_cache else 0,
        target_session_attrs=None if url.has_target else SessionAttribute.read_write,
        server_settings=None if url.has_name else {"application_name": "gpu-pool"},
    )


def _connected(attempts: Sequence[Attempt]) -> list[RawConnection]:
    return [each.result() for each in attempts if each.done() and each.exception() is None]


def _telling(attempts: Sequence[Attempt]) -> BaseException:
    """The error that helps most: one that another host would not have cured, such as a wrong password; else the last."""
    errors = [error for each in attempts if (error := each.exception()) is not None]
    return next((error for error in errors if not is_worth_another_host(error)), errors[-1])


async def _promoted_last(found: Sequence[RawConnection], url: DatabaseUrl) -> RawConnection:
    """Of several servers that can be written, the one that was promoted last. The others are primaries of before, which
    nobody stopped: what is written there is lost.
    """
    try:
        timelines = [int(await raw.fetchval(TIMELINE, timeout=CONNECT_TIMEOUT_S)) for raw in found]
    except ASYNCPG_ERRORS as error:
        raise as_journal_error(error, url) from None
    newest = max(timelines)
    if timelines.count(newest) > 1:
        raise JournalError(
            f"several servers of the database {url} can be written, and neither was promoted after the other: leave one of "
            "them in the URL, the one that has the pool"
        )
    logger.error(
        "several servers of the database %s can be written; the one that was promoted last is used. Stop the old primary, or "
        "make it a standby: a server that reaches only that one would grant GPUs that are in use",
        url,
    )
    return found[timelines.index(newest)]


def _leave(attempt: Attempt, chosen: RawConnection | None) -> None:
    """Cut a connection that is not used, and take note of an error, which is expected."""
    with suppress(asyncio.CancelledError, *ASYNCPG_ERRORS, ValueError):
        if attempt.result() is not chosen:
            attempt.result().terminate()
