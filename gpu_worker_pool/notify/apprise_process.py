"""Sends notices by Apprise. It is run as a program, because Apprise blocks and could not be stopped in a thread.

Each line of its standard input is a JSON object with a `url`, and with `title`, `body` and `is_bad` if something is to be sent;
without them the URL is only checked. Each is answered by a line: JSON null, or a text that says why it failed; after a notice
that failed none is sent.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any
from urllib.parse import unquote

_MOST_TEXT = 300
_SHORTEST_SECRET = 3


class _Warnings(logging.Handler):
    """Keeps what Apprise logs as a warning or worse. What it logs below that has whole URLs in it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _answer(asked: dict[str, Any], warnings: _Warnings) -> str | None:
    import apprise  # noqa: PLC0415 - this file is imported for its path, too

    url = asked["url"]
    asset = apprise.AppriseAsset(app_id="GPU Worker Pool", app_desc="GPU Worker Pool")
    warnings.texts.clear()
    service = apprise.Apprise.instantiate(url, asset=asset)
    if service is None:
        return _why_unusable(url, apprise.Apprise().details()["schemas"])
    if "title" not in asked:
        return None
    sender = apprise.Apprise(asset=asset)
    sender.add(service)
    kind = apprise.NotifyType.FAILURE if asked["is_bad"] else apprise.NotifyType.INFO
    if sender.notify(asked["body"], asked["title"], kind, body_format=apprise.NotifyFormat.TEXT):
        return None
    return _without_secrets(" ".join(warnings.texts) or "Apprise does not say why", url)[:_MOST_TEXT]


def _why_unusable(url: str, services: list[dict[str, Any]]) -> str:
    scheme = url.partition("://")[0].lower()
    if scheme in {"http", "https"}:
        return f"for a webhook, write {'json' if scheme == 'http' else 'jsons'}:// instead of {scheme}://"
    for service in services:
        if scheme in {*(service["protocols"] or ()), *(service["secure_protocols"] or ())}:
            forms = [form.replace("{schema}", scheme) for form in service["details"]["templates"]]
            return f"{service['service_name']} takes {min(forms, key=len)} or {max(forms, key=len)}; see {service['setup_url']}"
    return "Apprise does not know it; it must begin with ntfy://, slack://, mailto:// or the like"


def _without_secrets(text: str, url: str) -> str:
    """The text without any part of the URL: a topic or a host may be as secret as a password."""
    parts = re.split(r"[/?&=:@#]+", url.partition("://")[2])
    for part in sorted({*parts, *map(unquote, parts)}, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "****")
    return text


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a plugin prints is an answer
    warnings = _Warnings()
    logging.getLogger("apprise").addHandler(warnings)
    for line in sys.stdin:
        asked = json.loads(line)
        why = _answer(asked, warnings)
        print(json.dumps(why), file=answers, flush=True)
        if why is not None and "title" in asked:
            break  # what comes after it is sent after it


if __name__ == "__main__":
    main()
