"""Amounts of memory: one parser for Python and the command line, and sizes that people can read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.amounts import asked_mb, parse_memory_mb
from gpu_worker_pool.core.model.bounds import show_mb


@pytest.mark.parametrize(
    ("value", "memory_mb"),
    [
        ("8GB", 8192),
        ("8GiB", 8192),
        ("8 gb", 8192),
        ("8000MB", 8000),
        ("0.5TB", 524_288),
        ("12000", 12_000),
        (12_000, 12_000),
        (1.5, 1.5),
    ],
)
def test_an_amount_is_read_as_people_write_it(value: str | float, memory_mb: float) -> None:
    assert parse_memory_mb(value) == memory_mb


@pytest.mark.parametrize(
    "value", ["", "8 apples", "-8GB", "nan", "1_000", "٣GB", 0, -5, True, float("nan"), float("inf")]
)
def test_anything_else_is_refused_with_what_was_seen(value: Any) -> None:
    with pytest.raises(ValueError, match="write 12GB, 800MB or 12000") as refused:
        parse_memory_mb(value)
    assert repr(value) in str(refused.value)


def test_a_request_names_its_memory_once() -> None:
    assert asked_mb(None, None) is None
    assert asked_mb(8000, None) == 8000
    assert asked_mb(None, "8GB") == 8192
    with pytest.raises(ValueError, match="memory is '8GB' and memory_mb is 8000; give one of the two"):
        asked_mb(8000, "8GB")
    with pytest.raises(ValueError, match="memory: "):
        asked_mb(None, [])  # type: ignore[arg-type]


def test_sizes_are_shown_in_what_suits_them() -> None:
    shown = [show_mb(amount) for amount in (1, 800, 8000, 8192, 81_920, 81_559, 12 * 1024.0**2)]
    assert shown == ["1 MB", "800 MB", "8000 MB", "8 GB", "80 GB", "79.6 GB", "12288 GB"]


@given(st.floats(1, 1e9))
def test_a_size_is_never_shown_in_powers_of_ten(amount_mb: float) -> None:
    assert "e" not in show_mb(amount_mb)
    assert parse_memory_mb(show_mb(amount_mb)) == pytest.approx(amount_mb, rel=0.01, abs=0.5)
