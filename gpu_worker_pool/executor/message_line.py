"""A line of messages, each with its length before it, over a socket that never blocks."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

_CHUNK: Final = 1 << 16
_LARGE_CHUNK: Final = 1 << 20
# How much is read of one line before the others have their turn.
_TURN: Final = 1 << 22


class MessageLine:
    """One end of a line. What cannot be sent at once waits for `flush`; the other end may be slow, stopped or dead."""

    def __init__(self, end: socket.socket, length: struct.Struct) -> None:
        end.setblocking(False)  # noqa: FBT003 - its only parameter
        self._socket = end
        self._length = length
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        # Whether the other end has closed, or is gone. What it had sent before was received.
        self.is_over = False
        # Whether something could not be sent because the other end is gone.
        self.is_broken = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, *parts: bytes | bytearray | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Send a message of these parts. Only the first one may have descriptors with it."""
        size = sum(map(len, parts))
        header = self._length.pack(size)
        if descriptors:
            try:
                # The whole header fits into an empty line.
                socket.send_fds(self._socket, [header], list(descriptors))
            except OSError:
                self.is_broken = True
                return
            header = b""
        if size <= _CHUNK:
            parts = (b"".join((header, *parts)),)
            header = b""
        self._unsent.extend(memoryview(part) for part in (header, *parts) if len(part))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._unsent:
            part = self._unsent.popleft()
            try:
                sent = self._socket.send(part)
            except BlockingIOError:
                self._unsent.appendleft(part)
                return
            except OSError:  # the other end is gone
                self._unsent.clear()
                self.is_broken = True
                return
            if sent < len(part):
                self._unsent.appendleft(part[sent:])

    def receive(self) -> Iterator[bytes]:
        """The complete messages that have arrived."""
        read = 0
        while read < _TURN:
            try:
                data = self._socket.recv(_LARGE_CHUNK if len(self._received) > _CHUNK else _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_over = True
                break
            read += len(data)
            self._received += data
        yield from self._complete()

    def _complete(self) -> Iterator[bytes]:
        size = self._length.size
        while len(self._received) >= size:
            end = size + self._length.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = bytes(memoryview(self._received)[size:end])
            del self._received[:end]
            yield message

    def finish(self) -> None:
        """Send no more, so that the other end sees the end after what was sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()
