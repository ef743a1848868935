"""JSON of answers and events."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json


def encode(value: Any) -> bytes:
    """Encode as JSON, without a type of its own: dataclasses by their fields; infinities and NaN become null."""
    return to_json(value, inf_nan_mode="null")
