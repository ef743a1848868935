"""The calls that ask for, show, renew and end leases.

They are plain ASGI: a lease and its release are two calls that a worker waits for, and a framework's routing would take
longer than the decision. The documentation lists them like all others (see lease_docs.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import DrainingLease, EndedLease, Lease, QueuedLease
from gpu_worker_pool.core.queue.explain import Explainer
from gpu_worker_pool.host.clock import machine_mark
from gpu_worker_pool.host.identity import NoSuchProcess
from gpu_worker_pool.ledger.driver import NotWritten
from gpu_worker_pool.server.authority.authority import Authority, TooManyWaiting
from gpu_worker_pool.server.authority.snapshot import encode
from gpu_worker_pool.server.http.access import Caller, Denied, Tokens, may_manage, owner_for
from gpu_worker_pool.server.http.bodies import BodyError, ClientGone
from gpu_worker_pool.server.http.call import Call, Reply, not_possible, until_gone
from gpu_worker_pool.server.http.loop_share import Turns
from gpu_worker_pool.server.http.problems import Refused, problem

from .lease_form import MAX_WAIT_S, BadForm, LeaseForm, RenewForm, check_lease_id, parse_form
from .lease_view import brief_view, ended_view, iso_time, lease_view
from .pool_view import slot_view, slots_in_order

# While somebody waits on an open connection his lease is renewed for him, this often within its TTL.
RENEWALS_PER_TTL = 3
RETRY_AFTER = {"Retry-After": "1"}


class LeaseCalls:
    """Answers them. `is_open_to_pages` lets pages of any origin read."""

    def __init__(self, authority: Authority, tokens: Tokens, *, prefix: str, node: str, is_open_to_pages: bool) -> None:
        self.authority = authority
        self.tokens = tokens
        self._node = node
        self._prefix = prefix
        headers = [(b"content-type", b"application/json")]
        self._writing_headers = headers
        self._reading_headers = [*headers, (b"access-control-allow-origin", b"*")] if is_open_to_pages else headers
        self._fixed: dict[tuple[str, str], Callable[[Call], Awaitable[Reply]]] = {
            ("GET", f"{prefix}/leases"): self.list_leases,
            ("GET", f"{prefix}/pool"): self.show_pool,
            ("POST", f"{prefix}/leases/renew"): self.renew,
        }
        self._by_id: dict[str, Callable[[Call, str], Awaitable[Reply]]] = {
            "PUT": self.request,
            "GET": self.show,
            "DELETE": self.release,
        }
        self._lease_path = f"{prefix}/leases/"

    def find(self, method: str, path: str) -> Callable[[Call], Awaitable[Reply]] | None:
        """What answers this call; None where it is none of these."""
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed
        if path.startswith(self._lease_path):
            by_id = self._by_id.get(method)
            lease_id = path[len(self._lease_path) :]
            if by_id is not None:
                return lambda call: by_id(call, check_lease_id(lease_id))
            also = ("POST",) if path == f"{self._lease_path}renew" else ()
            return not_possible(method, path, (*self._by_id, *also))
        possible = tuple(known for known, fixed_path in self._fixed if fixed_path == path)
        return not_possible(method, path, possible) if possible else None

    async def serve(
        self, answer: Callable[[Call], Awaitable[Reply]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one call, errors included."""
        headers = self._reading_headers if scope["method"] == "GET" else self._writing_headers
        try:
            status, body = await answer(Call(scope, receive, self.tokens))
        except ClientGone:
            return
        except (BadForm, Denied, BodyError, Refused, NoSuchProcess, NotWritten, TooManyWaiting) as error:
            response = self.problem_of(error)
            response.raw_headers += headers[1:]  # all but the type
            await response(scope, receive, send)
        else:
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [*headers, (b"content-length", b"%d" % len(body))],
                }
            )
            await send({"type": "http.response.body", "body": body})

    def problem_of(self, error: Exception) -> Response:
        """What is answered where a call ends like this."""
        match error:
            case BadForm():
                return problem(error.status, error.detail)
            case Denied() | BodyError() | Refused():
                return problem(error.status, error.detail, dict(error.headers))
            case NoSuchProcess():
                return problem(422, f"{error}.")
            case TooManyWaiting():
                most = self.authority.max_waiting
                detail = f"{most} connections wait for a lease already, and no more can; ask without wait_s, or later."
                return problem(503, detail, RETRY_AFTER)
        detail = f"Nothing can be granted or ended now: {str(error).rstrip('.')}."
        if self.authority.driver.is_open:
            detail += " Ask again with the same id; that is harmless."
        return problem(503, detail, RETRY_AFTER)

    # --- the calls -------------------------------------------------------------------------------------------------

    async def request(self, call: Call, lease_id: str) -> Reply:
        """PUT /leases/{id}: ask, or ask again."""
        caller = call.caller()
        by_uuid = _by_uuid(call.query("devices"))
        form = parse_form(LeaseForm, await call.body())
        request = form.to_request(owner_for(caller, form.owner, self.tokens), None)
        known = await self.authority.driver.find(lease_id)
        if known is not None:
            self._check_is_his(caller, known)
        else:
            process = self.authority.machine.local_process(request.holder, is_loopback=call.is_loopback)
            if process is not None:
                request = replace(request, holder=replace(request.holder, process=process))
        events = await self.authority.driver.do(cmd.RequestLease(lease_id, request))
        self._refuse(lease_id, events)
        self.authority.was_heard_of(lease_id)
        is_new = any(isinstance(event, ev.LeaseQueued) and event.lease_id == lease_id for event in events)
        lease = await self._known(lease_id)
        if form.wait_s > 0 and isinstance(lease, QueuedLease) and self.authority.has_room_to_wait:
            await self._wait(lease, form.wait_s, call.receive, renews=True)
            lease = await self._known(lease_id)
        status = 200
        if is_new and not isinstance(lease, DrainingLease | EndedLease):
            status = 202 if isinstance(lease, QueuedLease) else 201
        return status, self._encode(lease, by_uuid=by_uuid)

    async def show(self, call: Call, lease_id: str) -> Reply:
        """GET /leases/{id}: the lease as it is, or as it will be within `wait_s` when it has left the queue."""
        query = call.query("wait_s", "devices")
        wait_s, by_uuid = _wait_s(query), _by_uuid(query)
        lease = await self._known(lease_id)
        # Everybody may look; only whoever may also give it back keeps it alive by that.
        caller = call.caller_or_none()
        is_his = caller is not None and may_manage(caller, lease.request.holder.owner, self.tokens)
        if isinstance(lease, QueuedLease):
            if is_his:
                await self._give_sign_of_life(lease_id)
            if wait_s > 0:
                await self._wait(lease, wait_s, call.receive, renews=is_his)
                lease = await self._known(lease_id)
        elif is_his:
            self.authority.was_heard_of(lease_id)
        return 200, self._encode(lease, by_uuid=by_uuid)

    async def renew(self, call: Call) -> Reply:
        """POST /leases/renew: a sign of life for many leases at once."""
        caller = call.caller()
        call.query()
        ids = parse_form(RenewForm, await call.body()).ids
        state = self.authority.driver.state
        others = [
            lease_id
            for lease_id in ids
            if (lease := state.find(lease_id)) and not may_manage(caller, lease.request.holder.owner, self.tokens)
        ]
        if others:
            raise Denied(403, f"Leases of somebody else cannot be renewed: {', '.join(others[:5])}.")
        events = await self.authority.driver.do(cmd.Renew(tuple(ids)))
        self.authority.was_heard_of(*ids)
        now = self.authority.driver.now()
        renewed: list[dict[str, Any]] = []
        lost: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ev.LeasesRenewed):
                for lease_id in event.lease_ids:
                    lease = state.leases.get(lease_id)
                    if lease is not None and not isinstance(lease, DrainingLease):
                        left_s = max(state.agenda.due_at(lease_id) - now, 0.0)
                        renewed.append({"id": lease_id, "expires_in_s": round(left_s, 3)})
                    else:  # it ended while that was written
                        lost.append({"id": lease_id, "reason": _end_reason(state.find(lease_id))})
            elif isinstance(event, ev.RenewalRefused):
                lost.append({"id": event.lease_id, "reason": str(event.reason)})
            elif isinstance(event, ev.LeaseUnknown):
                lost.append({"id": event.lease_id, "reason": "unknown"})
        return 200, encode({"renewed": renewed, "lost": lost})

    async def release(self, call: Call, lease_id: str) -> Reply:
        """DELETE /leases/{id}: give back, or leave the queue."""
        caller = call.caller()
        call.query()
        self._check_is_his(caller, await self._known(lease_id))
        await self.authority.driver.do(cmd.Release(lease_id))
        return 200, self._encode_ended(await self._known(lease_id))

    async def list_leases(self, _: Call) -> Reply:
        """GET /leases: all live leases."""
        if not self.authority.driver.is_open:
            raise NotWritten(self.authority.trouble)
        await self.authority.driver.caught_up()
        leases = [view async for _, view in self._live(self.authority.driver.state.leases, Turns())]
        return 200, b'{"node":%b,"leases":[%b]}' % (encode(self._node), b",".join(leases))

    async def show_pool(self, call: Call) -> Reply:
        """GET /pool: the node at a glance. `queue` bounds how many of those who wait are shown."""
        return 200, await self.pool(call.number("queue", len(self.authority.driver.state.queue)))

    # --- parts of them ---------------------------------------------------------------------------------------------

    async def pool(self, most_queued: int) -> bytes:
        """The node at a glance, with so many of those who wait; others have their turn while it is made."""
        driver, sampler = self.authority.driver, self.authority.sampler
        await driver.caught_up()
        state, turns = driver.state, Turns()
        others = (id_ for id_, lease in state.leases.items() if not isinstance(lease, QueuedLease))
        queue: list[bytes] = []
        leases: list[bytes] = []
        async for lease, view in self._live([*islice(state.queue, most_queued), *others], turns):
            # By what it is now: each is in one of them, whatever happens while others have their turn.
            (queue if isinstance(lease, QueuedLease) else leases).append(view)
        gpus = []
        for slot in slots_in_order(state):
            gpus.append(encode(slot_view(driver, slot)))
            await turns.pass_on()
        thresholds = state.settings.thresholds
        rest = encode(
            {
                "thresholds": {
                    "memory_percent": thresholds.memory_percent,
                    "utilization_percent": thresholds.utilization_percent,
                },
                "workers_per_gpu": state.settings.workers_per_gpu,
                "queue_length": len(state.queue),
                "server_id": self.authority.id,
                "machine": machine_mark(),
                "ignored_processes": sorted(state.ignored_processes),
                "can_grant": driver.trouble is None,
                "trouble": driver.trouble,
                "now": iso_time(driver.now() + state.wall_offset_s) if driver.is_open else None,
                "timestamp": sampler.snapshot.timestamp,
                "source": sampler.snapshot.source,
            }
        )
        parts = (encode(self._node), b",".join(gpus), rest[1:-1], b",".join(leases), b",".join(queue))
        return b'{"node":%b,"gpus":[%b],%b,"leases":[%b],"queue":[%b]}' % parts

    def _refuse(self, lease_id: str, events: list[ev.Event]) -> None:
        for event in events:
            match event:
                case ev.LeaseRefused(lease_id=refused, why=why) if refused == lease_id:
                    raise Refused(422, f"This can never be granted here: {why}.")
                case ev.LeaseConflicted(lease_id=refused) if refused == lease_id:
                    raise Refused(409, f"The lease {lease_id} was asked for with other wishes; use a new id.")
                case ev.QueueFull(lease_id=refused, limit=limit, is_owners_limit=True) if refused == lease_id:
                    whose = event.owner or "owners without a name"
                    raise Refused(429, f"{limit} requests of {whose} wait already, and no more may.", RETRY_AFTER)
                case ev.QueueFull(lease_id=refused, limit=limit) if refused == lease_id:
                    raise Refused(503, f"{limit} requests wait already, and no more can; ask later.", RETRY_AFTER)
                case _:
                    pass

    def _check_is_his(self, caller: Caller, lease: Lease) -> None:
        owner = lease.request.holder.owner
        if not may_manage(caller, owner, self.tokens):
            raise Denied(
                403, f"The lease {lease.id} is {owner or 'somebody'}'s; only its owner or admin may change it."
            )

    async def _known(self, lease_id: str) -> Lease:
        lease = await self.authority.driver.find(lease_id)
        if lease is None:
            raise Refused(404, f"There is no lease {lease_id}; it may have ended long ago. Ask with PUT for a new one.")
        return lease

    async def _give_sign_of_life(self, lease_id: str) -> None:
        self.authority.was_heard_of(lease_id)
        await self.authority.driver.do(cmd.Renew((lease_id,)))

    async def _wait(self, lease: QueuedLease, wait_s: float, receive: Receive, *, renews: bool) -> None:
        """Wait until the lease has left the queue; ends at once when the client goes away."""
        with self.authority.waiting_connection(lease.id if renews else None) as connection:
            gone = asyncio.ensure_future(until_gone(receive))
            waited = asyncio.ensure_future(self._wait_and_renew(lease, wait_s, renews=renews))
            try:
                await asyncio.wait({gone, waited}, return_when=asyncio.FIRST_COMPLETED)
                if not waited.done():
                    connection.is_broken = True
                    raise ClientGone("The client went away while it waited.")
                waited.result()
            finally:
                gone.cancel()
                waited.cancel()

    async def _wait_and_renew(self, lease: QueuedLease, wait_s: float, *, renews: bool) -> None:
        driver = self.authority.driver
        until, step_s = driver.now() + wait_s, lease.request.ttl_s / RENEWALS_PER_TTL
        while (left_s := until - driver.now()) > 0:
            await driver.wait_while_queued(lease.id, min(left_s, step_s))
            if not isinstance(driver.state.leases.get(lease.id), QueuedLease) or driver.is_closed:
                return
            if renews:
                await driver.do(cmd.Renew((lease.id,)))

    async def _live(self, lease_ids: Iterable[str], turns: Turns) -> AsyncIterator[tuple[Lease, bytes]]:
        """These leases in short, those left out that are not written."""
        driver = self.authority.driver
        explainer = Explainer(driver.state, driver.now())
        for lease_id in list(lease_ids):
            await turns.pass_on()
            lease = driver.state.leases.get(lease_id)
            if lease is not None and driver.is_written(lease_id):
                yield lease, encode(brief_view(driver.state, lease, driver.now(), explainer))

    def _encode(self, lease: Lease, *, by_uuid: bool) -> bytes:
        driver = self.authority.driver
        return encode(lease_view(driver.state, lease, driver.now(), by_uuid=by_uuid))

    def _encode_ended(self, lease: Lease) -> bytes:
        ended = lease.ended if isinstance(lease, DrainingLease) else lease
        if isinstance(ended, EndedLease):
            return encode(ended_view(self.authority.driver.state, ended))
        return self._encode(ended, by_uuid=False)


def _wait_s(query: Mapping[str, str]) -> float:
    text = query.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = float("nan")
    if not isfinite(wait_s) or not 0 <= wait_s <= MAX_WAIT_S:
        raise Refused(422, f"wait_s: {text[:40]!r} is no number of seconds from 0 to {MAX_WAIT_S:g}.")
    return wait_s


def _by_uuid(query: Mapping[str, str]) -> bool:
    word = query.get("devices", "index")
    if word not in {"index", "uuid"}:
        raise Refused(422, f"devices: {word[:40]!r} is neither index nor uuid.")
    return word == "uuid"


def _end_reason(lease: Lease | None) -> str:
    if isinstance(lease, DrainingLease):
        return str(lease.ended.reason)
    return str(lease.reason) if isinstance(lease, EndedLease) else "unknown"
