"""Which box of a fleet answers a call. Passes calls on to the leader, as they came, and its answers back.

They go on the link of this box to the leader. If the caller goes away, the call is given up there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import TypeAdapter

from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.host.processes import ForeignProcess, NoSuchProcess
from gpu_worker_pool.server.agent.frames import Begun
from gpu_worker_pool.server.agent.link import NO_LEADER, LinkAnswer, LinkLost
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.forms import Name, Number, Whole
from gpu_worker_pool.server.views.target import FLEET, Target
from gpu_worker_pool.wire.bounds import MAX_PID

from .call import Call
from .response import RETRY_AFTER, Headers, Refusal, Response

if TYPE_CHECKING:
    from gpu_worker_pool.server.agent.agent import Agent

MOST_LEARNED = 20_000
# The token of the caller stays here: the leader gets its digest.
SENT = ("accept", "accept-encoding", "content-type", "content-encoding", "user-agent")


def leader_answers(call: Call, answered_by: Literal["box", "leader", "custodian"], *, is_fleet: bool) -> bool:
    """Whether a call must be passed on to the leader of the fleet. Notes what it means."""
    membership = call.part(Pool).membership
    if membership is None and is_fleet:
        raise Refusal(
            404, "This server belongs to no fleet, so there is nothing below /fleet; leave that out to mean this box."
        )
    if membership is None or answered_by == "box":
        return False
    call.target = FLEET if is_fleet else Target(call.via_box or membership.node)
    if membership.is_leader:
        return False
    if call.forwarded is not None:
        raise Refusal(
            503,
            "This box does not lead its fleet, so it takes no call that another box passes on; ask again.",
            RETRY_AFTER,
        )
    # The leader knows the tokens of the fleet.
    return answered_by == "leader" or ("authorization" in call.headers and call.caller_or_none() is None)


@dataclass(frozen=True, slots=True)
class _NamedHolder:
    """What a request for a lease says of the process that is to hold it."""

    host: Name | None = None
    pid: Annotated[Whole, Ge(1), Le(MAX_PID)] | None = None
    pid_started: Annotated[Number, Ge(0), Le(1e15)] | None = None
    boot_id: Name | None = None
    pid_namespace: Name | None = None


_NAMED = TypeAdapter(_NamedHolder)


class Forwarding:
    """`membership` is the fleet as this box sees it; None without one."""

    def __init__(self, pool: Pool, membership: Callable[[], Agent | None], *, prefix: str) -> None:
        self._pool = pool
        self._membership = membership
        self._prefix = prefix
        self._under_way: set[LinkAnswer] = set()
        # The box that keeps a lease, as answers that passed through have told.
        self._learned: OrderedDict[str, str] = OrderedDict()

    async def pass_on(self, call: Call) -> Response:
        """Pass a call on; Refusal if there is no leader, ClientGone if the caller goes away meanwhile."""
        method = call.scope["method"]
        body = b"" if method in {"GET", "HEAD"} else await call.body()
        process = self._process(call, body) if method == "PUT" and "lease_id" in call.path_params else {}
        answer, gone, begun = await self._ask(call, body, process)
        if lease_id := call.path_params.get("lease_id"):
            self._learn(lease_id, begun)
        if begun.is_whole and method != "HEAD":
            answer.end()
            gone.cancel()
            self._under_way.discard(answer)
            return Response(begun.status, answer.whole, _headers(begun, with_length=False))
        return Response(begun.status, self._stream(answer, gone), _headers(begun, with_length=True))

    async def renew(self, call: Call, body: bytes) -> tuple[int, bytes]:
        """Pass a renewal on to the leader, with another body than the caller's; the status and the body of its answer."""
        answer, gone, begun = await self._ask(call, body, {})
        gone.cancel()
        try:
            return begun.status, answer.whole + b"".join([part async for part in answer.parts()])
        finally:
            answer.end()
            self._under_way.discard(answer)

    def keeper_of(self, lease_id: str) -> str | None:
        """The node that keeps a lease, if an answer that passed through has told."""
        return self._learned.get(lease_id)

    def stop(self) -> None:
        """End all calls that are under way."""
        for answer in self._under_way:
            answer.end("this server stops")

    async def _ask(
        self, call: Call, body: bytes, process: dict[str, Any]
    ) -> tuple[LinkAnswer, asyncio.Future[None], Begun]:
        """The beginning of the leader's answer; and what is done when the caller goes away, to be cancelled after that."""
        membership = self._membership()
        link = None if membership is None else membership.leader
        if link is None:
            raise no_leader(membership)
        headers = [(name, call.headers[name]) for name in SENT if name in call.headers]
        if body and "content-type" not in call.headers:
            headers.append(("content-type", "application/json"))
        said = call.forwarded_by(**process).encoded()
        answer = link.ask(call.scope["method"], _target(call, self._prefix), headers, said, body)
        self._under_way.add(answer)
        gone = call.gone()
        try:
            await asyncio.wait((answer.begun, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.begun.done():
                raise ClientGone("The client went away while it waited.")
            return answer, gone, answer.begun.result()
        except LinkLost as lost:
            raise Refusal(
                502,
                f"The link to the leader of the fleet ended ({lost}). Whether the call was carried out is not known: make the "
                "same call again, which is harmless.",
                RETRY_AFTER,
            ) from None
        finally:
            if not answer.begun.done() or answer.begun.exception() is not None:
                gone.cancel()
                answer.end()
                self._under_way.discard(answer)

    async def _stream(self, answer: LinkAnswer, gone: asyncio.Future[None]) -> AsyncGenerator[bytes, None]:
        gone.add_done_callback(lambda _: answer.end())
        try:
            if answer.whole:
                yield answer.whole
            async for part in answer.parts():
                yield part
        finally:
            gone.cancel()
            answer.end()
            self._under_way.discard(answer)

    def _process(self, call: Call, body: bytes) -> dict[str, Any]:
        """The holder's process on this box. What is wrong with the request itself, the leader says."""
        if call.uid is None:
            return {}
        try:
            named = _NAMED.validate_json(body)
        except ValueError:
            return {}
        caller = call.caller_or_none()
        holder = Holder(None, None, named.host, named.pid, named.pid_started, named.boot_id, named.pid_namespace)
        try:
            is_admin = caller is not None and caller.is_admin
            return {"process": self._pool.local_process(holder, uid=call.uid, may_name_any=is_admin)}
        except NoSuchProcess as error:
            return {"no_process": (422, f"{error}.")}
        except ForeignProcess as error:
            # The leader may know the caller's token as an administrator's.
            return {"process": error.process, "no_process": (403, f"{error}.")}

    def _learn(self, lease_id: str, begun: Begun) -> None:
        """Note which box keeps a lease, so that its renewals find it also while there is no leader."""
        self._learned.pop(lease_id, None)
        if begun.keeper is not None:
            self._learned[lease_id] = begun.keeper
            if len(self._learned) > MOST_LEARNED:
                self._learned.popitem(last=False)


def no_leader(membership: Agent | None) -> Refusal:
    why = (membership and membership.why_waiting) or NO_LEADER
    return Refusal(503, f"{why[0].upper()}{why[1:]}. Try again in a few seconds.", RETRY_AFTER)


def _target(call: Call, prefix: str) -> str:
    path = (call.scope.get("raw_path") or call.scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = call.scope.get("query_string", b"").decode("latin-1")
    return f"{path.removeprefix(prefix)}{'?' if query else ''}{query}"


def _headers(begun: Begun, *, with_length: bool) -> Headers:
    return tuple(
        (name.encode(), value.encode("latin-1"))
        for name, value in begun.headers
        if with_length or name != "content-length"
    )
