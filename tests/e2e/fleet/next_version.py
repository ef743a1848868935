"""The next version of this program: a copy of the package with what one version step may bring.

It has one more field in every message between boxes and in every lease that a box keeps, one more kind of message, and one
more field in an event of the journal. All of it is appended to the copy, so that the code can
change without a change here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gpu_worker_pool

PACKAGE = Path(gpu_worker_pool.__file__).parent
_MAJOR, _MINOR, _ = gpu_worker_pool.__version__.split(".")
VERSION = f"{_MAJOR}.{int(_MINOR) + 1}.0"

APPENDED = {
    "__init__.py": f"\n__version__ = {VERSION!r}\n",
    "server/agent/frames.py": """
_encode_message, _encode_kept = encode_message, encode_kept

def encode_message(message):
    return _encode_message(message)[:-1] + ',"colour":"red"}'

def encode_kept(thing):
    return _encode_kept(thing)[:-1] + ',"colour":"red"}'
""",
    "server/agent/link.py": """
_tell = BoxLink.tell

def tell(self, text):
    self._queue(b'{"kind":"Painted"}')
    _tell(self, text)

BoxLink.tell = tell
""",
    "ledger/codec.py": """
_encode_event, _decode_event = encode_event, decode_event

def encode_event(event):
    text = _encode_event(event)
    return text[:-1] + ',"colour":"red"}' if isinstance(event, ev.TakenOver) else text

def decode_event(text, node=None):
    return _decode_event(text.replace(',"colour":"red"}', "}"), node)
""",
}


def make_next_version(folder: Path) -> str:
    """Write the package of the next version into this folder; return the PYTHONPATH of a process that is to use it."""
    package = folder / PACKAGE.name
    # With what is compiled: the sources keep their times. Not with what pytest or another process is about to write.
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*-pytest-*", "*.pyc.*"))
    for name, text in APPENDED.items():
        with (package / name).open("a", encoding="utf-8") as file:
            file.write(text)
    return str(folder)
