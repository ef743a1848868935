"""Runs the commands whose output a json block shows, in this process: starting one for each would take most of the time."""

from __future__ import annotations

import json
import shlex
from typing import Any

from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.documents.blocks import Block, all_blocks
from tests.documents.schemas import unlike
from tests.server.leasing import put

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
