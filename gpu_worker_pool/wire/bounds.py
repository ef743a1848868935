"""The bounds of every number and text that a caller may send."""

from __future__ import annotations

import re

MIN_TTL_S = 0.1
MAX_WAIT_S = 300.0
# A client closes a connection that was idle for this time. The server keeps it open for longer.
CLIENT_IDLE_S = 30.0
MAX_RENEW_WAIT_S = 60.0
MAX_MEMORY_MB = 1e9
MAX_PID = 2**23
MAX_IDS = 1000
MAX_LABELS = 32
MAX_LABEL_KEY = 64
# Of all labels of a lease, keys and values together, in UTF-8: every answer about the lease has them.
MAX_LABELS_BYTES = 4096
MAX_TEXT = 256
MAX_MODEL = 128
MAX_REASON = 200
MAX_TIME = 64
MAX_PROCESS_NAME = 64
MAX_QUEUE = 999_999_999
FEWEST_HOURS, DEFAULT_HOURS, MOST_HOURS = 0.1, 6.0, 168.0
FEWEST_PACE_S, MOST_PACE_S = 0.1, 60.0

# Refused in names, because these texts appear in logs and on terminals: control characters, line breaks, characters that
# turn the direction of a line, and those that cannot be seen, with which two different names would look the same. That is
# Unicode's categories Cc, Cf, Zl and Zp, the variation selectors, and the fillers.
_UNPRINTABLE = (
    "00-1f 7f-9f ad 34f 600-605 61c 6dd 70f 890-891 8e2 115f-1160 17b4-17b5 180b-180f 200b-200f 2028-202e 2060-206f 2800 "
    "3164 fe00-fe0f feff ffa0 fff0-fffb 110bd 110cd 13430-1343f 1bca0-1bca3 1d173-1d17a e0000-e0fff"
)


def _class_of(ranges: str) -> str:
    """The inside of a character class for all programs that read it: beyond U+FFFF they share no escape."""

    def sign(number: str) -> str:
        return chr(int(number, 16)) if len(number) > 4 else f"\\u{number:0>4}"

    return "".join("-".join(map(sign, part.split("-"))) for part in ranges.split())


# Python reads this pattern, and other programs read it in the OpenAPI document.
PRINTABLE = f"^[^{_class_of(_UNPRINTABLE)}]*$"
_PRINTABLE = re.compile(PRINTABLE.removesuffix("$") + r"\Z")
# Characters that need no escape in a URL; "." and ".." would not arrive, because they shorten a path.
LEASE_ID = r"^(?!\.{1,2}$)[A-Za-z0-9._~-]{1,128}$"
_LEASE_ID = re.compile(LEASE_ID.removesuffix("$").replace("{1,2}$", r"{1,2}\Z") + r"\Z")
_LABEL_KEY = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_LABEL_KEY}}}")


def is_printable(text: str) -> bool:
    """Whether a text may appear in a log or on a terminal."""
    if _PRINTABLE.match(text) is None:
        return False
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def is_lease_id(text: str) -> bool:
    return _LEASE_ID.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    return _LABEL_KEY.fullmatch(text) is not None
