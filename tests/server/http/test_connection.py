"""What a connection remembers of its calls."""

from __future__ import annotations

import pytest

from gpu_worker_pool.server.http.connection import MOST_KNOWN_LENGTH, Connection

HOST = (b"host", b"localhost")


def test_the_same_headers_are_read_once() -> None:
    connection = Connection(None, None)

    put = connection.headers_of([HOST, (b"content-length", b"2")])
    delete = connection.headers_of([HOST])

    assert (put, delete) == ({"host": "localhost", "content-length": "2"}, {"host": "localhost"})
    assert connection.headers_of([HOST, (b"content-length", b"2")]) is put
    assert connection.headers_of([HOST]) is delete


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer abcdefgh"),
        (b"cookie", b"a=b"),
        (b"x-not-known", b"it may be a secret"),
        (b"user-agent", b"x" * MOST_KNOWN_LENGTH),
    ],
)
def test_headers_that_may_hold_a_secret_or_are_long_are_not_kept(header: tuple[bytes, bytes]) -> None:
    connection = Connection(None, None)

    read = connection.headers_of([HOST, header])

    assert read[header[0].decode()] == header[1].decode()
    assert connection.headers_of([HOST, header]) is not read


def test_few_headers_are_kept() -> None:
    connection = Connection(None, None)

    first = connection.headers_of([HOST])
    for number in range(9):
        connection.headers_of([HOST, (b"accept", b"%d" % number)])

    assert connection.headers_of([HOST]) is not first
