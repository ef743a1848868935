"""Bodies about tokens. No token is in any of them: a server knows only digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpu_worker_pool.core.model.configured import MAX_NOTE

from .bounds import MAX_TEXT, Note, Printable


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """A token to accept."""

    name: Annotated[str, Printable(MAX_TEXT), Note("Whose it is: the owner of leases that are requested with it.")]
    role: Annotated[str, Printable(MAX_TEXT), Note("user, operator or administrator.")] = "user"
    note: Annotated[str, Printable(MAX_NOTE), Note("Where it is used, in words.")] = ""


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
