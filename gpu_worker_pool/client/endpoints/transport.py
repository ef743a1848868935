"""One connection pool for all endpoints, and one way to call them: bounded in time and size, no redirects, JSON only."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.host.clock import boot_time

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 16 * 1024 * 1024
# How many connections stay open for the next call; those that wait for a GPU are not among them.
KEPT_CONNECTIONS = 256


class CallFailed(Exception):  # noqa: N818 - what happened to a call
    """There was no usable answer; the message says why, and whether to try again at once makes sense."""

    def __init__(self, reason: str, *, is_temporary: bool = True) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary


@dataclass(frozen=True, slots=True)
class Reply:
    """What an endpoint answered. `sent_at` is when the call was sent, on the clock that leases run on."""

    status: int
    data: Any
    sent_at: float
    took_s: float

    @property
    def detail(self) -> str:
        """What it says about an error."""
        text = self.data.get("detail") if isinstance(self.data, dict) else None
        return text if isinstance(text, str) and text else f"it answered with status {self.status}"


class Transport:
    """Calls endpoints over HTTP. aiohttp is loaded when it is opened, so that importing the client costs little."""

    def __init__(self, *, ca_file: str | None = None) -> None:
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Get ready; a CA file that cannot be used is an error here, not at the first call."""
        import aiohttp  # noqa: PLC0415 - it takes longer to load than everything else together

        tls: ssl.SSLContext | bool = True
        if self._ca_file:
            try:
                tls = ssl.create_default_context(cafile=self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"GPU_POOL_CA_FILE={self._ca_file!r} cannot be used: {error}") from error
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(
            connector=connector, headers={"User-Agent": "gpu-worker-pool"}, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        body: Mapping[str, Any] | None = None,
        token: str | None = None,
        timeout_s: float,
    ) -> Reply:
        """Make one call; CallFailed where there is no answer that can be read."""
        import aiohttp  # noqa: PLC0415 - loaded by now

        if self._session is None:
            raise CallFailed("the client is stopped")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        sent_at = boot_time()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                ) as response:
                    text = await _read(response)
                    status = response.status
        except TimeoutError:
            # That was long enough: whoever wants to know it again has to wait for his turn.
            raise CallFailed(f"no answer within {timeout_s:g} s", is_temporary=False) from None
        except aiohttp.ClientSSLError as error:
            raise CallFailed(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise CallFailed(f"cannot connect: {_in_words(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        if 300 <= status < 400:
            raise CallFailed(f"it redirects (status {status}), which is not followed; give the address it leads to")
        return Reply(status, _parse(text, status), sent_at, boot_time() - sent_at)


def _in_words(error: OSError) -> str:
    """As the system says it; where a name was not found its number is none of the system's, and the text says it."""
    number = error.errno
    return os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            response.close()
            raise CallFailed(f"its answer is larger than {MAX_BODY_BYTES // (1024 * 1024)} MiB")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(text: bytes, status: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if status >= 400:
            return None  # a proxy's or a foreign server's error page: the status says enough
        raise CallFailed("its answer is not JSON; is this a GPU statistics server?") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
