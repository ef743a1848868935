"""JSON as it is sent."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json


def encode(value: Any) -> bytes:
    """JSON as bytes; what is not finite is unknown."""
    return to_json(value, inf_nan_mode="null")
