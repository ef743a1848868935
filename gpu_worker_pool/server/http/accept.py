"""What a caller accepts, by its Accept headers."""

from __future__ import annotations

import re

_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)


def wants_page(accept: str | None) -> bool:
    """Whether this Accept header prefers a page to JSON. A caller that names no page gets JSON."""
    ranges: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, _, parameters = part.partition(";")
        ranges[kind.strip().lower()] = _quality(parameters)
    page = ranges.get("text/html", 0.0)
    json = next((ranges[kind] for kind in ("application/json", "application/*", "*/*") if kind in ranges), 0.0)
    return page > 0 and page >= json


def takes_gzip(accept_encoding: str | None) -> bool:
    for part in (accept_encoding or "").split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip().lower() == "gzip":
            return _quality(parameters) > 0
    return False


def _quality(parameters: str) -> float:
    """The parameter q; 1 if it is missing or invalid."""
    for parameter in parameters.split(";"):
        found = _QUALITY.fullmatch(parameter)
        if found is not None:
            return float(found[1])
    return 1.0
