"""Names of GPUs: the index as nvidia-smi shows it, the UUID, or a prefix of the UUID."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice

MAX_NAMES = 128
MAX_NAME = 64
# The same characters as in CUDA_VISIBLE_DEVICES (see host/visible_devices.py).
GPU_NAME = r"[0-9]+|[Gg][Pp][Uu]-[A-Za-z0-9_./:-]+|[Mm][Ii][Gg]-[A-Za-z0-9_./:-]+"
_NAME = re.compile(GPU_NAME)
_SHOWN = 8
_REMEMBERED = 256


def is_gpu_name(text: str) -> bool:
    """Whether a text has the form of a GPU's index or UUID, or of the beginning of a UUID."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def as_gpu_names(names: object) -> tuple[str, ...]:
    """Sort the names and drop duplicates, so that the same GPUs make equal wishes. A ValueError says what is allowed.

    Whole numbers stand for indices. Leading zeros of an index are dropped; UUIDs ignore case.
    """
    if not isinstance(names, Iterable) or isinstance(names, str | bytes):
        what = f"among is {_quoted(names)}; it must be a list of GPU indices and UUIDs"
        raise ValueError(what)  # noqa: TRY004 - as for every other wish
    texts = list(islice(map(_as_text, names), MAX_NAMES + 1))
    if not texts:
        raise ValueError("among is empty; leave it out to take any GPU")
    if len(texts) > MAX_NAMES:
        raise ValueError(f"among has more than {MAX_NAMES} GPUs; it must be 1 to {MAX_NAMES}")
    by_spelling = {text.lower(): text for text in sorted(texts, reverse=True)}
    return tuple(sorted(by_spelling.values(), key=_order))


def _as_text(name: object) -> str:
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) and abs(name) < 10**MAX_NAME else name
    if not isinstance(text, str) or not is_gpu_name(text):
        raise ValueError(
            f"among has {_quoted(name)}; each must be a GPU's index, its UUID (GPU-... or MIG-...) or the beginning of "
            f"that, of at most {MAX_NAME} characters"
        )
    return (text.lstrip("0") or "0") if text.isdigit() else text


def _order(name: str) -> tuple[bool, int, str]:
    return (False, int(name), "") if name.isdigit() else (True, 0, name)


def _quoted(value: object) -> str:
    """Quote a value in a few characters, however large or deep it is."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else f"{value[:40]}...")
    is_short = value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**40)
    return repr(value) if is_short else f"a value of type {type(value).__name__}"


@lru_cache(maxsize=_REMEMBERED)
def shown(names: tuple[str, ...]) -> str:
    """The names as text, cut to a line's length."""
    left_out = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left_out} more" if left_out > 0 else "")
