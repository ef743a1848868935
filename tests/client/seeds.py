"""The user's documents, and the blocks of Python in them. They stand beside this repository, where they are there."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import gpu_worker_pool

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
DOCUMENTS = ("README.md", "SERVER.md", "MIGRATION_GUIDE.md", "MULTI_ENDPOINT_DESIGN.md")
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<text>.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def text_of(document: str) -> str:
    path = SEEDS / document
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def blocks_of(document: str) -> list[Block]:
    text = text_of(document)
    return [
        Block(document, text.count("\n", 0, found.start()) + 2, textwrap.dedent(found["text"]))
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def is_signature(block: Block) -> bool:
    """A call with annotations in it is no Python: it is how the documents show a constructor."""
    return block.text.startswith("GPUWorkerPoolClient(\n    service_endpoint: Optional[str]")


def shows_a_model(block: Block) -> bool:
    return block.text.startswith("@dataclass")


def namespace() -> dict[str, Any]:
    """What a block may take for granted that is shown alone: what the documents imported further up."""
    names: dict[str, Any] = {name: getattr(gpu_worker_pool, name) for name in gpu_worker_pool.__all__}
    return names | {
        "__name__": "__main__",
        "asyncio": asyncio,
        "dataclass": dataclass,
        "datetime": datetime,
        "List": list,
        "Dict": dict,
    }
