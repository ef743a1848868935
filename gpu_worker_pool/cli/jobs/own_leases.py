"""What the servers know of a user's leases, beside and behind the submitted jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from gpu_worker_pool.cli.pools.reading import ask_names, ask_pools
from gpu_worker_pool.cli.pools.report import LeaseReport, PoolReport, distinct_leases
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_store import JobStore


class RequestWait(NamedTuple):
    """How the request of a submission waits: its lease, or why nothing is known of it."""

    lease: LeaseReport | None = None
    trouble: str | None = None


class Seen(NamedTuple):
    """What the servers show: all live leases, whose name the caller has where, and what is missing."""

    leases: Sequence[LeaseReport] = ()
    names: Mapping[str, str] = {}
    troubles: Sequence[str] = ()

    def is_mine(self, lease: LeaseReport) -> bool:
        return lease.view.owner is not None and lease.view.owner == self.names.get(lease.endpoint)


def see_leases(endpoints: list[str] | None) -> Seen:
    """The leases of the servers; of a box in a fleet, those of the fleet. A server that does not answer is in the troubles."""

    async def ask(servers: Servers) -> tuple[list[PoolReport], dict[str, str]]:
        reports = await ask_pools(servers)
        return reports, await ask_names(servers) if any(report.is_up for report in reports) else {}

    try:
        reports, names = Servers(endpoints, is_fleet=True).run(ask)
        if reports and all(report.status == HTTPStatus.SERVICE_UNAVAILABLE for report in reports):
            # Without a leader, a box knows what it keeps itself.
            alone, names = Servers(endpoints).run(ask)
            boxes = ", ".join(report.endpoint for report in alone if report.is_up)
            leases, why = distinct_leases(alone), reports[0].error
            return Seen(leases, names, [f"{why}; only the leases that {boxes} keeps are shown" if boxes else f"{why}"])
    except Failure as failure:
        return Seen(troubles=[f"only submitted jobs are shown: {failure}"])
    down = [f"{each.endpoint} is down, its leases are not shown: {each.error}" for each in reports if not each.is_up]
    return Seen(distinct_leases(reports), names, down)


def beside_jobs(leases: Iterable[LeaseReport], records: Iterable[JobRecord]) -> list[LeaseReport]:
    """The leases that are not those of these submissions."""
    ids, workers = set(), set()
    for record in records:
        ids |= {run.lease_id for run in record.submission.runs.values()}
        workers.add(record.submission.whole.requested_by or None)
    return [each for each in leases if each.id not in ids and (each.view.worker_id or "") not in workers]


def waits_of(store: JobStore, records: Iterable[JobRecord], seen: Seen) -> dict[int, RequestWait]:
    """How each request waits, by submission. One that the caller's servers do not show is asked for at its own."""
    found: dict[int, RequestWait] = {}
    answers: dict[str, Seen] = {}

    def lease_in(leases: Iterable[LeaseReport], worker_id: str) -> LeaseReport | None:
        return next((each for each in leases if each.view.state == "queued" and each.view.worker_id == worker_id), None)

    for record in records:
        if record.submission.requested_at is None:
            continue
        asked_by = record.submission.whole.requested_by
        if (lease := lease_in(seen.leases, asked_by)) is None:
            try:
                servers = Servers(record.spec.endpoints, environ=store.environment_of(record.number))
                key = repr((servers.config, sorted(servers.config.tokens.items())))
                if key not in answers:
                    reports = servers.run(ask_pools)
                    silent = [f"{each.endpoint} ({each.url}): {each.error}" for each in reports if not each.is_up]
                    who = "no server answers" if len(silent) == len(reports) else "not all servers answer"
                    answers[key] = Seen(
                        distinct_leases(reports), troubles=[f"{who}: {'; '.join(silent)}"] if silent else []
                    )
            except Failure as failure:
                found[record.number] = RequestWait(trouble=str(failure))
                continue
            lease = lease_in(answers[key].leases, asked_by)
            if lease is None and answers[key].troubles:
                found[record.number] = RequestWait(trouble=answers[key].troubles[0])
                continue
        found[record.number] = RequestWait(lease)
    return found
