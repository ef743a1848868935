"""Hold what a server answers and what a command prints against the example that a document shows of it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.documents.blocks import Block, all_blocks
from tests.server.leasing import put
from tests.server.shapes import misfits

# What there is to see, as the document tells it.
LEASES: dict[str, dict[str, Any]] = {
    "train-1": {"owner": "ada", "gpus": 2, "model": "A100", "ttl_s": 600, "labels": {"command": "train.py"}},
    "eval-1": {"owner": "bob", "model": "A100", "ttl_s": 600, "labels": {"command": "eval.py"}},
}


def examples() -> list[Block]:
    """Those that say which command prints them, in their order: one goes on from where the one before left the pool."""
    return [block for block in all_blocks() if "prints" in block.marks]


def assert_printed(example: Block, server: ServerProcess) -> None:
    """The command prints an object with the keys of the example and no others."""
    program, *arguments = shlex.split(example.marks["prints"])
    assert program == "gpu-pool", example
    done = called(*arguments, server=server)
    assert done.out.count("\n") == 1, (str(example), done)
    found = unlike(json.loads(example.text), done.json)
    assert not found, f"{example}: {'; '.join(found)}"


def make_leases(server: ServerProcess) -> None:
    # Where one of them is not as it is told, there is nothing to compare with, and all would seem to be well.
    made = [put(server, lease_id, **wishes).status for lease_id, wishes in LEASES.items()]
    assert made == [201, 202], made


def assert_fits(example: Block, answer: Any) -> None:
    """The answer has all that the example shows, and of the same kinds; nothing else, where it shows the whole."""
    compare = unlike if "whole" in example.marks else misfits
    found = compare(json.loads(example.text), answer)
    assert not found, f"{example}: {'; '.join(found)}"


def unlike(example: Any, answer: Any, place: str = "$") -> list[str]:
    """What differs: a key that only one of them has, or a value of another kind. Null is of any kind: what is not known
    here may be known elsewhere.
    """
    if example is None or answer is None:
        return []
    if isinstance(example, dict) and isinstance(answer, dict):
        found = [f"{place}.{key} is missing" for key in example if key not in answer]
        found += [f"{place}.{key} is not documented" for key in answer if key not in example]
        return found + [
            text for key in example if key in answer for text in unlike(example[key], answer[key], f"{place}.{key}")
        ]
    if isinstance(example, list) and isinstance(answer, list):
        # The first of a list stands for all of them.
        return [
            text
            for index, item in enumerate(answer if example else [])
            for text in unlike(example[0], item, f"{place}[{index}]")
        ]
    return misfits(example, answer, place)
