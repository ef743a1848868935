"""The code blocks of a document, and what their info strings say about running them.

Whoever writes a document writes blocks and nothing else. Marks that may follow the language:

    continues           builds on the block of the same language before it: the same names, the same shell
    fails               its last command must fail, as an answer of 4xx makes curl do
    runs-on             its last command goes on until it is stopped: it must print something, and is then ended
    not-run="reason"    cannot be run here; the reason must be one of ALLOWED_REASONS
    of="/path"          (json) what a GET of this path answers
    whole               (json) it shows every key there is; what is null in it may be anything
    prints="command"    (json) what this command prints, on a box where ada holds both A100 (train-1) and bob waits (eval-1)
    held-by="path"      (json) the test in this file holds it against what it is an example of

In Python, what stands in lines that begin with "# " is what the block prints; "..." stands for anything. A json block after
a shell block is what the last command of that block printed. A shell block that starts a server is run until it is up; a
json block after it, unless it is of a path, is what that server printed when it was. `train.py` stands beside every shell
block: it is the reader's program.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = frozenset({"continues", "fails", "runs-on", "not-run", "of", "whole", "prints", "held-by"})
ALLOWED_REASONS = frozenset(
    {
        "needs Docker",
        "a part of the configuration of JupyterHub",
        "needs hydra-submitit-launcher",
        "needs root and a GPU",
        "needs docker, podman, apptainer and a GPU",
        "needs systemd",
        "needs root",
        "needs a PostgreSQL server",
        "needs two machines",
        "needs a terminal",
        "installs packages",
        "fetches the repository",
        "takes half a minute",
    }
)
# Nothing is done with these but to be read; a command hides in none of them.
PLAIN = frozenset({"", "text", "ini", "nginx", "yaml", "env", "toml"})
RUN = frozenset({"python", "bash"})

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.DOTALL | re.MULTILINE)
_SERVES = re.compile(
    r"^(?:\w+=\S*\s+)*(?:python3? (?:-m gpu_worker_pool\.gpu_server|gpu_worker_pool/gpu_server\.py)|gpu-pool serve"
    r"|uvicorn )[^&\n]*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One of them. `answers` are the json blocks that follow a shell block, before any other."""

    document: str
    line: int
    language: str
    marks: Mapping[str, str]
    text: str
    answers: list[Block] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in RUN and "not-run" not in self.marks

    @property
    def serves(self) -> bool:
        """Whether it starts a server that runs on."""
        return self.language == "bash" and _SERVES.search(self.text) is not None


Chain = list[Block]


def documents() -> list[Path]:
    """All of them: those at the root, and docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


@cache
def blocks_of(document: Path) -> list[Block]:
    return parse(str(document.relative_to(ROOT)), document.read_text(encoding="utf-8"))


def parse(document: str, text: str) -> list[Block]:
    blocks: list[Block] = []
    for found in _FENCE.finditer(text):
        language, *marks = shlex.split(found["info"]) or [""]
        block = Block(
            document,
            text.count("\n", 0, found.start()) + 1,
            language,
            {name: value for name, _, value in (mark.partition("=") for mark in marks)},
            textwrap.dedent(found["text"]),
        )
        if language == "json" and blocks and not block.marks.keys() & {"prints", "held-by"}:
            asked = next((b for b in reversed(blocks) if b.language != "json"), None)
            if asked is not None and asked.language == "bash":
                asked.answers.append(block)
        blocks.append(block)
    return blocks


def all_blocks() -> list[Block]:
    return [block for document in documents() for block in blocks_of(document)]


def chains(language: str) -> list[Chain]:
    """What is run together: a block, and those that continue it."""
    return [chain for document in documents() for chain in chains_in(blocks_of(document), language)]


def chains_in(blocks: list[Block], language: str) -> list[Chain]:
    found: list[Chain] = []
    for block in blocks:
        if block.language != language or not block.is_run:
            continue
        if "continues" in block.marks:
            assert found, f"{block} continues nothing"
            found[-1].append(block)
        else:
            found.append([block])
    return found


def prose_of(document: Path) -> str:
    """The document without its blocks."""
    return without_blocks(document.read_text(encoding="utf-8"))


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)
