"""The one way to call a server: bounded in time and size, no redirects, JSON only."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpu_worker_pool.host.clock import boot_time

from .reader import plain

if TYPE_CHECKING:
    import aiohttp

MAX_BYTES = 16 * 1024 * 1024


class CallFailed(Exception):  # noqa: N818 - an event, not a mistake
    """A call without a usable answer. The message says why; `is_temporary` whether to try again at once."""

    def __init__(self, reason: str, *, is_temporary: bool = True) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its JSON. `sent_at` is on the clock of the leases; `date` is the server's wall clock."""

    status: int
    data: Any
    sent_at: float
    took_s: float
    date: str | None = None
    body: bytes = b""

    @property
    def detail(self) -> str:
        """What the server says about an error."""
        text = self.data.get("detail") if isinstance(self.data, dict) else None
        return plain(text) if isinstance(text, str) and text else f"it answered with status {self.status}"


class Transport:
    """Calls servers over HTTP. `open` loads aiohttp, so that importing the client is cheap."""

    def __init__(self, *, ca_file: str | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._ca_file = ca_file
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the session; a ValueError if the CA file cannot be used."""
        import aiohttp  # noqa: PLC0415 - it loads more slowly than everything else together

        from .resolver import PatientResolver  # noqa: PLC0415 - it loads aiohttp, too

        tls: ssl.SSLContext | bool = True
        if self._ca_file:
            try:
                tls = ssl.create_default_context(cafile=self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"GPU_POOL_CA_FILE={self._ca_file!r} cannot be used: {error}") from error
        # No cookies, no proxy of the environment, no compression: two compressed megabytes may be gigabytes.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=30, resolver=PatientResolver()),
            headers={"User-Agent": "gpu-worker-pool", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        body: Mapping[str, Any] | None = None,
        token: str | None = None,
        timeout_s: float,
        is_parsed: bool = True,
    ) -> Reply:
        """Make one call; CallFailed if there is no readable answer. Without `is_parsed`, the answer has its body only."""
        import aiohttp  # noqa: PLC0415 - loaded by now

        if self._session is None:
            raise CallFailed("the client is stopped")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        sent = None if body is None else json.dumps(body).encode()
        sent_at = boot_time()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(
                    method, url, data=sent, headers=headers, allow_redirects=False
                ) as response:
                    text = await self._read(response)
        except TimeoutError:
            # The timeout was long enough: the caller must not try again at once.
            raise CallFailed(f"no answer within {timeout_s:g} s", is_temporary=False) from None
        except aiohttp.ClientSSLError as error:
            raise CallFailed(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise CallFailed(f"cannot connect: {_in_words(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        status = response.status
        if 300 <= status < 400:
            raise CallFailed(f"it redirects (status {status}), which is not followed; give the address it leads to")
        took_s = boot_time() - sent_at
        data = _parse(text, status) if is_parsed else None
        return Reply(status, data, sent_at, took_s, response.headers.get("Date"), text)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._max_bytes:
                response.close()
                raise CallFailed(f"its answer is larger than {self._max_bytes // (1024 * 1024)} MiB")
            chunks.append(chunk)
        return b"".join(chunks)


def _in_words(error: OSError) -> str:
    """The system's text. A failed name lookup has a number of its own, and only its text helps."""
    number = error.errno
    return os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)


def _parse(text: bytes, status: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if status >= 400:
            return None  # an error page of a proxy or a foreign server: the status is enough
        raise CallFailed("its answer is not JSON; is this a GPU statistics server?") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
