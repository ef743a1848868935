"""Where notices may go, as a user writes it."""

from __future__ import annotations

from email.utils import parseaddr
from urllib.parse import urlsplit

from .rule import Mail

LEAST_SECRET = 16


def mail_to(address: str) -> Mail:
    """A ValueError unless it is one address."""
    if parseaddr(address)[1] != address or "@" not in address or not address.isprintable() or " " in address:
        raise ValueError(f"mail is {address!r}; it must be one address, such as ada@example.org")
    return Mail(address)


def check_url(url: str) -> None:
    """A ValueError unless it is http or https, and has no password."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        has_secret = parts.username is not None or parts.password is not None
    except ValueError:
        is_usable = has_secret = False
    if not is_usable or not url.isprintable() or " " in url:
        raise ValueError("a webhook must be a URL that begins with http:// or https:// and names a host")
    if has_secret:
        raise ValueError("the URL of a webhook has a user name or password, which ends up in logs; sign with a secret")


def check_secret(secret: str, where: str) -> str:
    """The secret; a ValueError if it is easily guessed."""
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"{where} has fewer than {LEAST_SECRET} characters; `openssl rand -hex 32` makes a secret")
    return secret
