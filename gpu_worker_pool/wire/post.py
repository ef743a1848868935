"""One POST to a server that is none of ours: no redirects, cookies or proxies, and no answer but its head counts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from .connections import connect
from .http1 import AnswerReader, encode
from .local_sockets import server_of
from .transport import address_of, target_of

_MAX_BYTES = 64 * 1024


async def post(url: str, body: bytes, fields: Mapping[str, str], timeout_s: float) -> AnswerReader:
    """Send JSON; the answer. A TimeoutError, ConnectFailed, BadAnswer or OSError where there is none, and a ValueError where
    the URL cannot be used.
    """
    base = server_of(url)
    where, head = address_of(base, None)
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "Connection: close\r\n"
    request = encode("POST", target_of(url.partition("#")[0], base), head, body)
    tls = ssl.create_default_context() if where.is_tls else None
    answer = AnswerReader(_MAX_BYTES)
    async with asyncio.timeout(timeout_s):
        connection = await connect(where, tls)
        try:
            connection.send(request)
            while not answer.status and (data := await connection.receive()):
                answer.feed(data)
            if not answer.status:
                answer.end()
        finally:
            connection.close()
    return answer
