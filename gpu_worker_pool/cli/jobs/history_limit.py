"""How long jobs that are over are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from gpu_worker_pool.amounts import parse_span
from gpu_worker_pool.jobs.life import JobLife

KEEP_VARIABLE: Final = "GPU_POOL_JOBS_KEEP"
_DEFAULT: Final = "30d"
logger = logging.getLogger(__name__)


def keep_s(environ: Mapping[str, str]) -> float:
    """GPU_POOL_JOBS_KEEP in seconds; a bad value is logged, and the default is used."""
    text = environ.get(KEEP_VARIABLE, "").strip() or _DEFAULT
    try:
        return parse_span(text, KEEP_VARIABLE)
    except ValueError as error:
        logger.error("%s; using the default %s", error, _DEFAULT)  # noqa: TRY400 - a sentence is enough
        return parse_span(_DEFAULT)


def check_keep(environ: Mapping[str, str]) -> None:
    """Raise ValueError where GPU_POOL_JOBS_KEEP is not a duration."""
    parse_span(environ.get(KEEP_VARIABLE, "").strip() or _DEFAULT, KEEP_VARIABLE)


def numbers_to_forget(lives: Iterable[JobLife], now: float, kept_s: float) -> list[int]:
    """The submissions that have been over for so long, with no live job after them."""
    tasks: dict[int, list[JobLife]] = {}
    for life in lives:
        tasks.setdefault(life.key.number, []).append(life)
    needed = {
        before.number
        for jobs in tasks.values()
        for life in jobs
        if not life.state.is_over
        for before in life.terms.after
    }
    return [
        number
        for number, jobs in tasks.items()
        if number not in needed
        and all(life.state.is_over and life.ended_at is not None and now - life.ended_at > kept_s for life in jobs)
    ]
