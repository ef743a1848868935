"""The facts that operators set, by table."""

from __future__ import annotations

from typing import Final

from .access_token import AccessToken as AccessToken  # noqa: PLC0414
from .access_token import Role as Role  # noqa: PLC0414
from .booking import Booking as Booking  # noqa: PLC0414
from .quota import Quota as Quota  # noqa: PLC0414

Value = str | Quota | AccessToken | Booking
# The key of a row: a node and a UUID for a GPU, else one text.
Key = tuple[str, ...]

TABLES: Final[dict[str, type[Value]]] = {
    "excluded": str,
    "new_gpus": str,
    "ignored_processes": str,
    "quotas": Quota,
    "tokens": AccessToken,
    "bookings": Booking,
}
