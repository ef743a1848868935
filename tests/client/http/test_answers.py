"""Answers are read the same however their bytes are cut, and what is not a whole answer is refused."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.client.http.answers import AnswerReader, BadAnswer, encode

HEAD = b"HTTP/1.1 200 OK\r\nDate: now\r\n"
PLAIN = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nX-After: 1\r\n\r\n"
WHOLE = [
    PLAIN,
    CHUNKED,
    HEAD + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN,
]


def read(*parts: bytes, max_bytes: int = 1024) -> AnswerReader:
    """An answer whose last part completes it."""
    reader = AnswerReader(max_bytes)
    assert [reader.feed(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    return reader


@given(st.sampled_from(WHOLE), st.data())
def test_an_answer_is_the_same_however_it_is_cut(answer: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6)))
    reader = read(*(answer[start:end] for start, end in pairwise([0, *cuts, len(answer)])))
    assert (reader.status, reader.body, reader.fields["date"], reader.is_reusable) == (200, b"hello", "now", True)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
        (HEAD + b"Content-Length: 0\r\n\r\n", b""),
    ],
)
def test_what_may_have_no_body(answer: bytes, body: bytes) -> None:
    assert read(answer).body == body


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        PLAIN + b"HTTP/1.1 200 OK\r\n",
        CHUNKED + b"x",
        HEAD + b"Connection: close, x\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Connection: x\r\nConnection: Close\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=[
        "closed",
        "old",
        "more than was asked for",
        "more after chunks",
        "closed and more",
        "two lines",
        "two lengths",
    ],
)
def test_a_connection_that_may_bring_something_else_is_not_used_again(answer: bytes) -> None:
    reader = read(answer)
    assert reader.body == b"hello"
    assert not reader.is_reusable


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = AnswerReader(1024)
    assert not reader.feed(HEAD + b"\r\nhel")
    assert not reader.feed(b"lo")
    reader.end()
    assert (reader.body, reader.is_reusable) == (b"hello", False)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", "length of its answer cannot be read"),
        (HEAD + b"no colon\r\n\r\n", "head of its answer cannot be read"),
        (HEAD + b" folded: x\r\n\r\n", "head of its answer cannot be read"),
        (HEAD + b"Content-Length: -5\r\n\r\n", "length of its answer"),
        (HEAD + b"Content-Length: +5\r\n\r\n", "length of its answer"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "length of its answer"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "part of its answer"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n", "part of its answer"),
        (HEAD + b"X: " + b"x" * 100_000, "too large"),
        (HEAD + b"Content-Length: 2097152\r\n\r\n", "larger than 1 MiB"),
        (HEAD + b"\r\n" + b"x" * 1_100_000, "larger than 1 MiB"),
        (
            HEAD
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"80000\r\n"
            + b"x" * 0x80000
            + b"\r\n80001\r\n"
            + b"x" * 0x80001,
            "larger",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(answer: bytes, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        AnswerReader(1024 * 1024).feed(answer)


@given(st.sampled_from([PLAIN, CHUNKED]), st.data())
def test_an_answer_that_is_cut_off_is_never_taken_for_a_whole_one(answer: bytes, data: st.DataObject) -> None:
    reader = AnswerReader(1024)
    cut = data.draw(st.integers(0, len(answer) - 1))
    if cut:
        assert not reader.feed(answer[:cut])
    with pytest.raises(BadAnswer, match="closed the connection"):
        reader.end()


@given(st.binary(max_size=200))
def test_no_bytes_bring_another_error(noise: bytes) -> None:
    for answer in (noise, HEAD + noise, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + noise):
        reader = AnswerReader(1024)
        with suppress(BadAnswer):
            if not reader.feed(answer):
                reader.end()


def test_a_request_says_how_long_its_body_is() -> None:
    assert encode("GET", "/pool", "Host: a\r\n", None) == b"GET /pool HTTP/1.1\r\nHost: a\r\n\r\n"
    sent = encode("PUT", "/leases/a", "Host: a\r\n", b"{}")
    assert sent.endswith(b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


def test_what_an_answer_needs_is_bound_by_its_size_however_small_its_chunks_are() -> None:
    size, reader = 200_000, AnswerReader(1024 * 1024)
    tracemalloc.start()
    try:
        reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(size // 1000):
            assert not reader.feed(b"1\r\nx\r\n" * 1000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.feed(b"0\r\n\r\n")
    assert reader.body == b"x" * size
    assert held < 2 * size
