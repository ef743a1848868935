"""Requests that a program sends again and again, byte for byte: monitoring polls the statistics.

Such a request was read and answered before. So `BoundedProtocol` knows it by its bytes, and does not read it again. Its
answer is put together once for each reading of the GPUs, and sent in one write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope

from .response import Headers

# Different requests that are known at the same time, and the longest of them.
MOST_REQUESTS = 256
MOST_BYTES = 1024
# None of these holds a secret, and none of them changes the answer or what becomes of the connection.
PLAIN_HEADERS = frozenset({b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection"})


class PolledAnswer:
    """The answer to the requests for one path. An answer that is too long for one write is not made here."""

    def __init__(self, path: str, make_body: Callable[[], bytes], headers: Headers, longest: int) -> None:
        self.path = path
        self._make_body = make_body
        self._headers = headers
        self._longest = longest
        self._body: bytes | None = None
        self._default_headers: Sequence[tuple[bytes, bytes]] = ()
        self._whole: bytes | None = None

    def whole(self, default_headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """Head and body. The server replaces its default headers once a second: the date is one of them."""
        body = self._make_body()
        if body is not self._body or default_headers is not self._default_headers:
            self._body, self._default_headers = body, default_headers
            headers = (*default_headers, *self._headers, (b"content-length", b"%d" % len(body)))
            lines = (b"HTTP/1.1 200 OK", *(b"%b: %b" % header for header in headers), b"", body)
            self._whole = b"\r\n".join(lines) if len(body) <= self._longest else None
        return self._whole


class PolledRequests:
    """The answers to polled requests, by the bytes of the requests."""

    def __init__(self, polled: Mapping[str, Callable[[], bytes]], headers: Headers, longest: int) -> None:
        self._by_path = {path: PolledAnswer(path, make, headers, longest) for path, make in polled.items()}
        self._by_request: dict[bytes, PolledAnswer] = {}
        self.find = self._by_request.get

    def learn(self, request: bytes, scope: Scope) -> None:
        """Know these bytes from now on, if they are one whole polled request, which was read as this scope."""
        answer = self._by_path.get(scope["path"])
        if answer is None or scope["method"] != "GET" or scope["http_version"] != "1.1" or scope["query_string"]:
            return
        headers = scope["headers"]
        # A line for each header, the first line, and an empty one at the end.
        is_one = request.endswith(b"\r\n\r\n") and request.count(b"\n") == len(headers) + 2
        is_plain = all(
            name in PLAIN_HEADERS and (name != b"connection" or value.lower() == b"keep-alive")
            for name, value in headers
        )
        if is_one and is_plain and len(request) <= MOST_BYTES:
            if len(self._by_request) >= MOST_REQUESTS:
                self._by_request.clear()
            self._by_request[request] = answer
