"""Somebody who looks over the page's shoulder while a test uses it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Request, WebError


class Watch:
    """Puts down what a page must never do: print an error, raise one, break its policy, ask another host.

    What the browser blocks because of the Content-Security-Policy it prints as an error.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._seen: list[str] = []
        self._allowed: list[str] = []

    def over(self, context: BrowserContext) -> None:
        """Watch all pages of this context."""
        context.on("console", self._on_console)
        context.on("weberror", self._on_error)
        context.on("request", self._on_request)

    def allow(self, pattern: str) -> None:
        """This test does something of which the browser itself prints an error, like a refused connection."""
        self._allowed.append(pattern)

    @property
    def complaints(self) -> list[str]:
        """What was seen and is not allowed."""
        return [text for text in self._seen if not any(re.search(pattern, text) for pattern in self._allowed)]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._seen.append(f"console: {message.text} ({message.location['url']})")

    def _on_error(self, raised: WebError) -> None:
        self._seen.append(f"raised: {raised.error.message} {raised.error.stack or ''}")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob"} and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self._seen.append(f"asked elsewhere: {request.method} {request.url}")
