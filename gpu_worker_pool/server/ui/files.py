"""The files of the page."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

FOLDER = "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. Its tag changes with its content."""

    content_type: bytes
    etag: bytes
    body: bytes


class PageFiles:
    """The files of the page by name, each read on first use. A caller's text never becomes part of a path."""

    def __init__(self) -> None:
        folder = files(__package__) / FOLDER
        found = list(folder.iterdir()) if folder.is_dir() else []
        self._paths: dict[str, Traversable] = {path.name: path for path in found if _type_of(path.name)}
        self._read: dict[str, PageFile] = {}

    def find(self, name: str) -> PageFile | None:
        known = self._read.get(name)
        if known is not None:
            return known
        path, content_type = self._paths.get(name), _type_of(name)
        if path is None or content_type is None:
            return None
        body = path.read_bytes()
        etag = f'"{sha256(body).hexdigest()[:32]}"'
        return self._read.setdefault(name, PageFile(content_type.encode(), etag.encode(), body))


def _type_of(name: str) -> str | None:
    return next((kind for suffix, kind in TYPES.items() if name.endswith(suffix)), None)
