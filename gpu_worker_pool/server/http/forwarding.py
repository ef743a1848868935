"""Which box of a fleet answers a call. Passes calls on to the leader, as they came, and its answers back.

A call that was passed on is never passed on again (forwarded.py). What is sent is bounded; what comes back is streamed. If
the caller goes away, the connection to the leader is closed, so that the leader notices.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from gpu_worker_pool.host.identity import ForeignProcess, NoSuchProcess
from gpu_worker_pool.server.agent.membership import Membership
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.forms import LeaseForm
from gpu_worker_pool.server.views.target import FLEET, Target

from .call import Call
from .forwarded import HEADER, check_forwarded
from .problems import RETRY_AFTER, Refusal
from .response import Headers, Response
from .validation import read_form

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 3.0
# The leader answers within five minutes, the longest that a caller may wait; a stream says something every 15 seconds.
SILENT_S = 330.0
# How often it is checked whether the leader is still the leader.
CHECK_S = 0.5
# A short answer is read before it is sent. A lease with all of its GPUs is short.
SHORT_BYTES = 512 * 1024
MOST_LEARNED = 20_000
SENT = ("authorization", "accept", "accept-encoding", "content-type", "content-encoding", "user-agent")
ANSWERED = (
    "content-type", "content-encoding", "cache-control", "vary", "etag", "retry-after", "www-authenticate",
    "x-accel-buffering", "accept-encoding",
)  # fmt: skip


def leader_answers(call: Call, answered_by: Literal["box", "leader", "custodian"], *, is_fleet: bool) -> bool:
    """Whether a call must be passed on to the leader of the fleet. Notes what it means, and the box that passed it on."""
    membership = call.part(Pool).membership
    if (said := call.headers.get(HEADER)) is not None:
        call.forwarded = check_forwarded(
            said,
            is_leader=membership is not None and membership.is_leader,
            node_of_key=None if membership is None else membership.node_of_key,
        )
    if membership is None and is_fleet:
        raise Refusal(
            404, "This server belongs to no fleet, so there is nothing below /fleet; leave that out to mean this box."
        )
    if membership is None or answered_by == "box":
        return False
    call.target = FLEET if is_fleet else Target(call.via_box or membership.node)
    if membership.is_leader or call.forwarded is not None:
        return False
    # The leader knows the tokens of the fleet.
    return answered_by == "leader" or ("authorization" in call.headers and call.caller_or_none() is None)


class BoxAnswer(NamedTuple):
    status: int
    data: Any


class Forwarding:
    """`membership` is the fleet as this box sees it; None without one."""

    def __init__(self, pool: Pool, membership: Callable[[], Membership | None], *, prefix: str) -> None:
        self._pool = pool
        self._membership = membership
        self._prefix = prefix
        self._session: aiohttp.ClientSession | None = None
        self._is_stopping = False
        # The box that keeps a lease, as answers that passed through have told.
        self._learned: OrderedDict[str, str] = OrderedDict()

    async def pass_on(self, call: Call) -> Response:
        """Pass a call on; Refusal if the leader cannot be reached, ClientGone if the caller goes away meanwhile."""
        method = call.scope["method"]
        body = b"" if method in {"GET", "HEAD"} else await call.body()
        process: dict[str, Any] = (
            self._process(call, body) if method == "PUT" and "lease_id" in call.path_params else {}
        )
        gone = call.gone()
        try:
            answer, whole, url = await self._ask(call, body, process, gone)
            if whole is not None:
                self._learn(call, answer.status, whole)
                gone.cancel()
                return Response(answer.status, whole, _headers(answer, with_length=False))
        except BaseException:
            gone.cancel()
            raise
        return Response(answer.status, self._stream(answer, gone, url), _headers(answer, with_length=True))

    async def renew(self, call: Call, body: bytes) -> BoxAnswer:
        """Pass a renewal on to the leader, with another body than the caller's."""
        gone = call.gone()
        try:
            answer, whole, url = await self._ask(call, body, {}, gone)
            return BoxAnswer(
                answer.status, json.loads(await self._whole(answer, gone, url) if whole is None else whole)
            )
        finally:
            gone.cancel()

    async def ask_box(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> BoxAnswer | None:
        """Ask another box; None if it does not answer."""
        import aiohttp  # noqa: PLC0415 - it loads slowly, and servers without a fleet do not need it

        limit = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S)
        try:
            async with self._opened().post(url, data=body, headers=headers, timeout=limit) as answer:
                return BoxAnswer(answer.status, json.loads(await answer.read()))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def keeper_of(self, lease_id: str) -> str | None:
        """The node that keeps a lease, if an answer that passed through has told."""
        return self._learned.get(lease_id)

    def stop(self) -> None:
        """End all calls that are under way."""
        self._is_stopping = True

    async def close(self) -> None:
        self.stop()
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self, call: Call, body: bytes, process: dict[str, Any], gone: asyncio.Future[None]
    ) -> tuple[aiohttp.ClientResponse, bytes | None, str]:
        """The beginning of the leader's answer, all of it if it is short, and the URL of that leader."""
        import aiohttp  # noqa: PLC0415 - it loads slowly, and servers without a fleet do not need it
        from yarl import URL  # noqa: PLC0415 - it comes with it

        membership = self._membership()
        url, key = (None, None) if membership is None else (membership.leader_url, membership.key)
        if membership is None or url is None or key is None:
            why = (membership and membership.trouble) or "no box is known to lead the fleet"
            raise Refusal(
                503, f"This call cannot be passed on to the leader of the fleet: {why}. Ask again.", RETRY_AFTER
            )
        headers = {name: call.headers[name] for name in SENT if name in call.headers}
        headers[HEADER] = call.forwarded_by(membership.node, key, **process).header()
        if body and "content-type" not in headers:
            headers["content-type"] = "application/json"
        target = URL(f"{url.rstrip('/')}{_target(call, self._prefix)}", encoded=True)
        for is_last in (False, True):
            sent = self._opened().request(call.scope["method"], target, data=body or None, headers=headers)
            try:
                answer, whole = await self._race(asyncio.ensure_future(_begun(sent)), gone, url)
            except aiohttp.ServerDisconnectedError:
                # The leader closed a connection that it had kept open. All calls may be made twice.
                if is_last:
                    raise _broken(url) from None
            except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
                raise Refusal(
                    503,
                    f"The leader of the fleet cannot be reached at {url}: {error}.",
                    RETRY_AFTER,
                ) from None
            except (aiohttp.ClientError, TimeoutError, OSError):
                raise _broken(url) from None
            else:
                if HEADER not in answer.headers:
                    return answer, whole, url
                answer.release()
                raise Refusal(
                    503,
                    f"The leader of the fleet ({url}) has ended its connection with this box, which makes another one; ask again.",
                    RETRY_AFTER,
                )
        raise AssertionError("unreachable")

    async def _whole(self, answer: aiohttp.ClientResponse, gone: asyncio.Future[None], url: str) -> bytes:
        """The rest of a short answer. The connection is closed if that does not come."""
        import aiohttp  # noqa: PLC0415 - it loads slowly, and servers without a fleet do not need it

        try:
            return cast("bytes", await self._race(asyncio.ensure_future(answer.read()), gone, url))
        except (aiohttp.ClientError, TimeoutError, OSError):
            raise _broken(url) from None
        finally:
            answer.close()

    async def _race(self, work: asyncio.Future[Any], gone: asyncio.Future[None], url: str) -> Any:
        """The outcome of the work, unless the caller goes away, this server stops, or that box leads no more: each wait for
        the leader ends so. A box that hears nothing of its leader for 3 s has none.
        """
        try:
            while True:
                await asyncio.wait({work, gone}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if gone.done():
                    raise ClientGone("The client went away while it waited.")
                membership = self._membership()
                if self._is_stopping or membership is None or membership.leader_url != url:
                    raise _broken(url)
        finally:
            work.cancel()

    async def _stream(
        self, answer: aiohttp.ClientResponse, gone: asyncio.Future[None], url: str
    ) -> AsyncGenerator[bytes, None]:
        try:
            with suppress(ClientGone, Refusal):
                while piece := await self._race(asyncio.ensure_future(answer.content.readany()), gone, url):
                    yield piece
        finally:
            gone.cancel()
            answer.close()

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415 - it loads slowly, and servers without a fleet do not need it

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            )
        return self._session

    def _process(self, call: Call, body: bytes) -> dict[str, Any]:
        """The holder's process on this box. What is wrong with the request itself, the leader says."""
        try:
            form = read_form(LeaseForm, body)
        except Refusal:
            return {}
        caller = call.caller_or_none()
        is_admin = caller is not None and caller.is_admin
        try:
            return {"process": self._pool.local_process(form.holder(None), uid=call.uid, may_name_any=is_admin)}
        except NoSuchProcess as error:
            return {"no_process": (422, f"{error}.")}
        except ForeignProcess as error:
            # The leader may know the caller's token as an administrator's.
            return {"process": error.process, "no_process": (403, f"{error}.")}

    def _learn(self, call: Call, status: int, body: bytes) -> None:
        """Note which box keeps an active lease, so that its renewals find it also while there is no leader."""
        if status not in {200, 201} or "lease_id" not in call.path_params:
            return
        with suppress(ValueError, TypeError, KeyError, IndexError):
            lease = json.loads(body)
            if lease["state"] == "active":
                self._learned[lease["id"]] = str(lease["gpus"][0]["node"])
                self._learned.move_to_end(lease["id"])
            else:
                self._learned.pop(lease["id"], None)
        while len(self._learned) > MOST_LEARNED:
            self._learned.popitem(last=False)


async def _begun(sent: Awaitable[aiohttp.ClientResponse]) -> tuple[aiohttp.ClientResponse, bytes | None]:
    """An answer, and all of it if it is short. The connection is closed if the rest does not come."""
    answer = await sent
    if answer.method == "HEAD" or not 0 <= int(answer.headers.get("content-length", -1)) <= SHORT_BYTES:
        return answer, None
    try:
        return answer, await answer.read()
    finally:
        answer.close()


def _broken(url: str) -> Refusal:
    return Refusal(
        502,
        f"The connection to the leader of the fleet ({url}) broke, or another box leads now. Whether the call was carried out "
        "is not known: make the same call again, which is harmless.",
        RETRY_AFTER,
    )


def _target(call: Call, prefix: str) -> str:
    path = (call.scope.get("raw_path") or call.scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = call.scope.get("query_string", b"").decode("latin-1")
    return f"{path.removeprefix(prefix)}{'?' if query else ''}{query}"


def _headers(answer: aiohttp.ClientResponse, *, with_length: bool) -> Headers:
    names = (*ANSWERED, "content-length") if with_length else ANSWERED
    found = ((name, answer.headers[name]) for name in names if name in answer.headers)
    return tuple((name.encode(), value.encode("latin-1", "replace")) for name, value in found)
