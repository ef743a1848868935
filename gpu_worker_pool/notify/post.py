"""One POST to a receiver that is not ours: no redirects, cookies or proxies, and only the head of its answer counts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

_MAX_HEAD = 64 * 1024
_PORTS = {"http": 80, "https": 443}


async def post(url: str, body: bytes, fields: Mapping[str, str], timeout_s: float) -> tuple[int, str | None]:
    """Send JSON; the status and the Retry-After of the answer. A TimeoutError or OSError where there is none, and a
    ValueError where the URL cannot be used.
    """
    parts = urlsplit(url)
    name = (parts.hostname or "").encode("idna").decode("ascii")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe="!#$%&'()*+,/:;=?@[]~-._")
    host = f"[{name}]" if ":" in name else name
    head = {
        "Host": host if parts.port is None else f"{host}:{parts.port}",
        "User-Agent": "gpu-worker-pool",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **fields,
        "Connection": "close",
    }
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    async with asyncio.timeout(timeout_s):
        port = parts.port or _PORTS[parts.scheme]
        reader, writer = await asyncio.open_connection(name, port, ssl=tls, limit=_MAX_HEAD)
        try:
            writer.write("\r\n".join(lines).encode("latin-1") + body)
            status, after = 0, None
            while status < 200:  # what comes before is not the answer yet
                status, after = _read_head(await reader.readuntil(b"\r\n\r\n"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise OSError("it closed the connection without an answer, or its answer is too large") from None
        finally:
            writer.transport.abort()
    return status, after


def _read_head(head: bytes) -> tuple[int, str | None]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise OSError("its answer is not HTTP")
    found = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(rest[:3]), found.get("retry-after")
