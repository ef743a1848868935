"""Bodies about tokens. No token is in any of them: a server knows only digests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """A token that is accepted. `digest` is its SHA-256 in hexadecimal; null for one of GPU_POOL_TOKENS."""

    digest: str | None
    name: str
    role: str
    added_at: str | None = None
    added_by: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """All tokens that are accepted."""

    server_id: str
    tokens: tuple[TokenView, ...]
