"""GET /peers: the other servers, as this server sees them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.response import Response
from gpu_worker_pool.urls import EndpointUrl, parse_endpoint, split_endpoints, unique_endpoints

if TYPE_CHECKING:
    from gpu_worker_pool.server.peers import Peers

logger = logging.getLogger(__name__)

# Each may answer with megabytes, and all are asked at the same time.
MOST_PEERS = 64


class PeerCalls:
    def __init__(self, urls: str | None, *, own_id: str) -> None:
        self._peers: Peers | None = None
        found = parse_peers(urls or "")
        if found:
            # It loads an HTTP client, which is slow, and few servers need one.
            from gpu_worker_pool.server.peers import Peers  # noqa: PLC0415

            self._peers = Peers(found, own_id=own_id)

    def handlers(self) -> Handlers:
        return {"peers": self.show}

    async def show(self, call: Call) -> Response:
        """The last answer of each peer. Nothing of the call is passed on to them."""
        call.query()
        return Response(200, await self.peers())

    @property
    def has_peers(self) -> bool:
        return self._peers is not None

    async def peers(self) -> bytes:
        """The last answer of each peer. Calling this keeps the polling of the peers going."""
        if self._peers is None:
            return b'{"peers":[]}'
        await self._peers.ensure_polling()
        return self._peers.encode()

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()


def parse_peers(text: str) -> list[EndpointUrl]:
    """Parse URLs from a text with commas, without duplicates; an invalid one is logged and left out."""
    found = []
    for part in split_endpoints(text):
        try:
            found.append(parse_endpoint(part))
        except ValueError as error:
            logger.error("GPU_POOL_PEERS: %s; it is left out", error)  # noqa: TRY400
    found = unique_endpoints(found)
    if len(found) > MOST_PEERS:
        logger.error("GPU_POOL_PEERS: of %d peers only the first %d are asked", len(found), MOST_PEERS)
    return found[:MOST_PEERS]
