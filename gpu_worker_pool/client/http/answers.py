"""HTTP/1.1 as these calls need it, without any I/O: a request as bytes, and its answer out of bytes as they come."""

from __future__ import annotations

import re
from typing import Final

_MAX_HEAD: Final = 64 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")
_WITHOUT_BODY: Final = frozenset({204, 304})


class BadAnswer(Exception):  # noqa: N818 - a verdict on the server
    """The bytes are not an answer that can be used. The message says why."""


def encode(method: str, target: str, fields: str, body: bytes | None) -> bytes:
    """A request; `fields` are the lines of its head."""
    kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{method} {target} HTTP/1.1\r\n{fields}{kind}\r\n".encode("latin-1") + (body or b"")


class AnswerReader:
    """Reads one answer. `fields` have small letters, and `body` is whole once `feed` or `end` has said so."""

    def __init__(self, max_bytes: int) -> None:
        self.status = 0
        self.fields: dict[str, str] = {}
        self.body = b""
        # Whether another call can be made over the same connection.
        self.is_reusable = False
        self.has_begun = False
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        # What has come of the body in chunks, in one piece however small the chunks are.
        self._joined = bytearray()
        # How long the body is; None where it is chunked, or ends with the connection.
        self._length: int | None = None
        self._is_chunked = False

    def feed(self, data: bytes) -> bool:
        """Take in bytes; returns whether the answer is whole."""
        self.has_begun = True
        self._buffer += data
        while not self.status and (end := self._buffer.find(_END_OF_HEAD)) >= 0:
            self._read_head(self._buffer[:end].decode("latin-1"))
            del self._buffer[: end + len(_END_OF_HEAD)]
        if not self.status:
            if len(self._buffer) > _MAX_HEAD:
                raise BadAnswer("the head of its answer is too large")
            return False
        if self._is_chunked:
            is_whole = self._take_chunks()
        else:
            is_whole = self._length is not None and len(self._buffer) >= self._length
        if max(len(self._joined) + len(self._buffer), self._length or 0) > self._max_bytes:
            raise BadAnswer(f"its answer is larger than {self._max_bytes // (1024 * 1024)} MiB")
        if is_whole:
            self.body = bytes(self._joined if self._is_chunked else self._buffer[: self._length])
            # What comes unasked could be taken for the answer to the next call.
            self.is_reusable = self.is_reusable and len(self._buffer) == (self._length or 0)
        return is_whole

    def end(self) -> None:
        """Take in the end of the connection; BadAnswer unless the answer ends with it."""
        if not self.status or self._is_chunked or self._length is not None:
            what = "before its answer was complete" if self.has_begun else "without an answer"
            raise BadAnswer(f"it closed the connection {what}")
        self.body = bytes(self._buffer)

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        match = _STATUS_LINE.fullmatch(first)
        if match is None:
            raise BadAnswer("its answer is not HTTP")
        if match[2][0] == "1":
            return  # the answer itself is still to come
        fields = self.fields
        for line in lines:
            name, colon, value = line.partition(":")
            name, value = name.lower(), value.strip()
            if not colon or name != name.strip():
                raise BadAnswer("the head of its answer cannot be read")
            is_same_length = name == "content-length" and fields.get(name) == value
            fields[name] = value if name not in fields or is_same_length else f"{fields[name]}, {value}"
        status, length = int(match[2]), fields.get("content-length")
        coding = fields.get("transfer-encoding", "").lower()
        if coding not in {"", "chunked"} or not (length is None or (length.isdecimal() and len(length) < 16)):
            raise BadAnswer("the length of its answer cannot be read")
        if status in _WITHOUT_BODY:
            self._length = 0
        elif coding:
            self._is_chunked = True
        elif length is not None:
            self._length = int(length)
        options = {option.strip().lower() for option in fields.get("connection", "").split(",")}
        # With two lengths, a proxy between may have read the other one.
        is_certain = self._length is not None or (self._is_chunked and length is None)
        self.is_reusable = match[1] == "1" and "close" not in options and is_certain
        self.status = status

    def _take_chunks(self) -> bool:
        at, buffer = 0, self._buffer
        try:
            while (end := buffer.find(b"\r\n", at)) >= 0:
                size = _CHUNK_SIZE.fullmatch(buffer, at, end)
                if size is None:
                    raise BadAnswer("a part of its answer cannot be read")
                start, stop = end + 2, end + 2 + int(size[1], 16)
                if start == stop:
                    # The last one. Fields may follow, which say nothing of use here, and an empty line.
                    last = end if buffer.startswith(b"\r\n", start) else buffer.find(_END_OF_HEAD, start)
                    at = at if last < 0 else last + len(_END_OF_HEAD)
                    return last >= 0
                if len(buffer) < stop + 2:
                    return False
                if not buffer.startswith(b"\r\n", stop):
                    raise BadAnswer("a part of its answer cannot be read")
                self._joined += buffer[start:stop]
                at = stop + 2
            return False
        finally:
            del buffer[:at]
