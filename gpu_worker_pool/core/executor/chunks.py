"""Items of `map` in chunks, each of which is one task. A worker loads this file, so it is small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

_ItemT = TypeVar("_ItemT")


def chunked(items: Iterable[_ItemT], size: int) -> Iterator[tuple[_ItemT, ...]]:
    iterator = iter(items)
    while chunk := tuple(islice(iterator, size)):
        yield chunk


def call_for_each(function: Callable[..., _ItemT], chunk: Iterable[tuple[Any, ...]]) -> list[_ItemT]:
    return [function(*args) for args in chunk]


def flattened(chunks: Iterable[list[_ItemT]]) -> Iterator[_ItemT]:
    """The items of all chunks; none is kept once it was given out."""
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()
