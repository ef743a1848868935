"""CLI.md leaves out no command, option, exit code or key; and a command that any document names can be typed so."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from gpu_worker_pool import failure
from gpu_worker_pool.cli.app import COMMANDS, function_of, paths
from gpu_worker_pool.cli.declare import HelpWanted, flags_of, read
from gpu_worker_pool.cli.serve.command import FLAGS
from gpu_worker_pool.client.guarded_lease import command_env
from gpu_worker_pool.models import GPUAssignment
from gpu_worker_pool.pytest_plugin import DEFAULT_TIMEOUT_S, WISHES
from tests.documents.blocks import ROOT, Block, blocks_of, documents
from tests.documents.schemas import unlike
from tests.documents.test_facts import code_in, document, rows, section

CLI = ROOT / "docs" / "CLI.md"
# Two that are told together.
TOLD_AS = {name: told for told in ("drain, undrain", "backup, restore") for name in told.split(", ")}


def options_of(name: str) -> set[str]:
    """As they are typed, in their long form."""
    functions = [function_of(name, part) for each, part in paths() if each == name]
    every = {flag for function in functions for flag in flags_of(function)}
    return {flag for flag in every if flag.startswith("--")} - {"--help"}


# --- commands and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    told = " ".join(code_in(section("CLI.md", TOLD_AS.get(name, name))))
    assert options_of(name) <= set(re.findall(r"--[a-z-]+", told))


def test_no_option_is_described_that_no_command_has() -> None:
    plugin = {"--gpu-endpoint", "--gpu-timeout", "--gpu-missing"}
    own = {"--help", "--version", "--install-completion", "--show-completion"}
    known = set().union(*(options_of(name) for name in COMMANDS)) | own | plugin
    assert set(re.findall(r"`(--[a-z-]+)", document("CLI.md"))) <= known


def test_every_flag_of_serve_stands_beside_its_setting() -> None:
    told = section("CLI.md", "serve")
    for setting, flag in FLAGS.items():
        assert re.search(rf"`{flag}`[^|]*\| `{setting.upper()}` \|", told), flag


def typed_commands() -> Iterator[tuple[str, str]]:
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"`(?:[A-Z_]+=\S+ )*gpu-pool ([a-z][^`\n]*)`", text):
            yield path.name, found


def test_what_is_told_to_be_typed_is_understood() -> None:
    typed = list(typed_commands())
    assert len(typed) > 50
    for place, text in typed:
        name, *arguments = shlex.split(text)
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


def test_every_exit_code_is_in_the_table() -> None:
    table = re.findall(r"^\| ([\d+N, ]+) \|", section("CLI.md", "Exit codes"), re.MULTILINE)
    codes = {int(code) for code in re.findall(r"\d+", " ".join(table))}
    ours = {value for name, value in vars(failure).items() if name.isupper() and isinstance(value, int)}
    assert codes == {0, 1} | ours


def test_what_a_command_finds_in_its_environment_is_described() -> None:
    assignment = GPUAssignment(gpu_id=0, worker_id="w", assigned_at=datetime.now())  # noqa: DTZ005 - as the client has it
    told = code_in(section("CLI.md", "run"))
    assert set(told) >= command_env({}, assignment).keys() | {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


def test_the_plugin_is_described() -> None:
    told = section("CLI.md", "pytest")
    assert set(code_in(told)) >= set(WISHES)
    defaults = {row[0].strip("`"): row[2] for row in rows(told)}
    assert defaults["--gpu-timeout"] == f"{DEFAULT_TIMEOUT_S:g}"


# --- JSON ------------------------------------------------------------------------------------------------------------


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        below = (keys_of(item) for key, item in value.items() if key not in {"labels", "models"})
        return set(value).union(*below)
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def examples() -> list[Block]:
    return [block for block in blocks_of(CLI) if block.language == "json"]


def heading_of(block: Block) -> str:
    before = document("CLI.md").splitlines()[: block.line]
    return next(line for line in reversed(before) if line.startswith("#")).lstrip("# ")


# These print what a server answers, or a list of it.
OF_SERVERS = {"status", "top", "leases", "explain", "report", "reservations", "reserve", "quota", "token", "fleet"}
OF_SERVERS |= {"drain", "undrain", "release"}


def test_every_command_with_json_has_an_example_of_it() -> None:
    schemas = {match[1] for block in examples() if (match := re.search(r"gpu-pool/([a-z]+)/1", block.text))}
    assert {name for name in COMMANDS if "--json" in options_of(name)} - {"demo"} - OF_SERVERS == schemas
    told = code_in(section("CLI.md", "What the server answers"))
    assert {word.split()[0] for word in told} >= OF_SERVERS
    assert {"whole" in block.marks or "held-by" in block.marks for block in examples()} == {True}


@pytest.mark.parametrize("block", examples(), ids=heading_of)
def test_every_key_is_described(block: Block) -> None:
    told = code_in(section("CLI.md", heading_of(block)))
    if "JSON" not in heading_of(block):  # the state file, which says where the rest is told
        told += code_in(section("CLI.md", "batch JSON"))
    assert keys_of(json.loads(block.text)) <= {*told, "schema", "id"}


# --- what compares ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"a": 1, "b": [{"c": "y"}, {"c": None}]}, []),
        ({"a": None, "b": []}, []),
        ({"b": []}, ["$.a is missing"]),
        ({"a": 1, "b": [], "d": 1}, ["$.d is not documented"]),
        ({"a": 1, "b": [{"c": "y"}, {"c": 3}]}, ["$.b[1].c is 3, not like 'x'"]),
        ({"a": 1, "b": [{"c": "y", "e": 1}]}, ["$.b[0].e is not documented"]),
        ({"a": 1, "b": {}}, ["$.b is no list"]),
    ],
)
def test_a_schema_is_held_key_by_key(answer: Any, found: list[str]) -> None:
    assert unlike({"a": 1, "b": [{"c": "x"}]}, answer) == found
