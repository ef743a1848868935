"""What the documents name exists: commands can be typed as they stand, variables are read, and what a user is shown is explained."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

from gpu_worker_pool.cli.app import COMMANDS, expand, function_of
from gpu_worker_pool.cli.declare import HelpWanted, read
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.leases import LeaseState
from gpu_worker_pool.wire.pool import GpuState
from tests.documents.blocks import ROOT, all_blocks, documents

SETTINGS = {name.upper() for name in ServerSettings.model_fields}
VARIABLE = r"\bGPU_[A-Z]+(?:_[A-Z]+)*\b(?!_)"


def typed_commands() -> Iterator[tuple[str, str]]:
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"`(?:[A-Z_]+=\S+ )*gpu-pool ([a-z][^`\n]*)`", text):
            yield path.name, found


def test_what_is_told_to_be_typed_is_understood() -> None:
    typed = list(typed_commands())
    assert len(typed) > 50
    for place, text in typed:
        name, *arguments = expand(shlex.split(text))
        if name == "help" or not arguments:  # a name alone speaks of the command
            continue
        assert name in COMMANDS, (place, text)
        group, part = COMMANDS[name].group, ""
        if group and (arguments[0] in group or "" not in group):
            part, *arguments = arguments
            assert part in group, (place, text)
        if not arguments:  # it speaks of the command
            continue
        with contextlib.suppress(HelpWanted):
            read(f"gpu-pool {name}", function_of(name, part), arguments)


def test_every_variable_that_a_document_names_is_read_by_somebody() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpu_worker_pool").rglob("*.py"))
    known = SETTINGS | set(re.findall(VARIABLE, code))
    for path in documents():
        assert set(re.findall(VARIABLE, path.read_text(encoding="utf-8"))) <= known, path.name


def test_the_example_of_the_settings_describes_all_of_them_and_blocks_name_no_others() -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    described = {}
    for before, line in pairwise(lines):
        if found := re.match(r"(?:# )?([A-Z_]+)=", line):
            described[found[1]] = before.startswith("# ")
    assert described.keys() >= SETTINGS
    assert [name for name, is_described in described.items() if not is_described] == []
    for block in all_blocks():
        if block.language == "env":
            assert set(re.findall(r"^(\w+)=", block.text, re.MULTILINE)) <= described.keys(), block


def test_the_glossary_explains_every_state_and_reason_once_and_in_order() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| \*\*([^*]+)\*\* \|", text, re.MULTILINE)
    assert terms == sorted(set(terms), key=str.lower)
    assert {state.replace("_", " ") for state in (*get_args(GpuState), *get_args(LeaseState))} <= set(terms)
    assert {"leader", "follower", "agent", "candidate"} <= set(terms)
    assert {str(reason) for reason in EndReason} <= set(re.findall(r"`([^`\n]+)`", text))
