"""What the documents show must work. How a document is written for this is told in tests/documents/blocks.py."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.answers import assert_fits, assert_printed, examples, make_leases
from tests.documents.blocks import (
    ALLOWED_REASONS,
    MARKS,
    PLAIN,
    ROOT,
    RUN,
    Chain,
    all_blocks,
    chains,
    documents,
    prose_of,
)
from tests.documents.names import looking_up
from tests.documents.network import Network, running_network
from tests.documents.python_blocks import run_chain
from tests.documents.shell_blocks import Shell, calls, get


def unique_key(chain: Chain) -> str:
    """The same for chains that lead to the same, and are held against nothing else."""
    commands = re.sub(r"\s+# .*", "", "\n".join(block.text for block in chain)).strip()
    return name_of(chain) if chain[-1].answers else commands


def name_of(chain: Chain) -> str:
    return str(chain[0])


DOCUMENTS = documents()
SHELL_CHAINS = chains("bash")
# Starting a server takes a while, and several documents show the same lines for it: those are run once.
SERVING = list({unique_key(chain): chain for chain in SHELL_CHAINS if chain[-1].serves}.values())
OTHERS = [chain for chain in SHELL_CHAINS if not chain[-1].serves]
# Examples of answers that a GET of a path has, and that no command before them printed.
FETCHED = [
    block for block in all_blocks() if "of" in block.marks and not any(block in chain[-1].answers for chain in SERVING)
]
FOLDERS = ("tests", "gpu_worker_pool", "deploy", "benchmarks", "examples", "docs")
PACKAGES = ("core", "host", "gpus", "ledger", "wire", "server", "client", "executor", "jobs", "notify", "cli")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with running_network() as running:
        yield running


# --- what can be run is run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", chains("python"), ids=name_of)
def test_python_blocks_print_what_they_say(
    chain: Chain, network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", looking_up(network.ports))
    for name, value in network.environment("\n".join(block.text for block in chain)).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "sitecustomize.py").write_text("from tests.documents.names import lead\n\nlead()\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    before = dict(os.environ)
    try:
        run_chain(chain)
        assert network.held() == []
    finally:
        os.environ.clear()
        os.environ.update(before)  # a block may set what it likes
        network.clear()


@pytest.mark.parametrize("chain", OTHERS, ids=name_of)
def test_shell_blocks_do_what_they_say(chain: Chain, network: Network, tmp_path: Path) -> None:
    if shutil.which("curl") is None and any(calls(block.text, "curl") for block in chain):
        pytest.skip("curl is not installed")
    try:
        Shell(tmp_path, network, chain).run()
    finally:
        network.clear()


@pytest.mark.parametrize("chain", SERVING, ids=name_of)
def test_a_shell_block_starts_a_server(chain: Chain, network: Network, tmp_path: Path) -> None:
    Shell(tmp_path, network, chain).serve()


def test_an_example_of_a_path_is_like_its_answer(network: Network) -> None:
    for block in FETCHED:
        assert_fits(block, get(network.ports["here"], block.marks["of"]))


def test_an_example_of_a_command_is_like_what_it_prints(network: Network) -> None:
    try:
        make_leases(network.servers["here"])
        for block in examples():
            assert_printed(block, network.servers["here"])
    finally:
        network.clear()


# --- nothing slips through -------------------------------------------------------------------------------------------


def test_every_block_is_of_a_known_kind_and_marked_by_known_words() -> None:
    for block in all_blocks():
        assert block.language in PLAIN | RUN | {"json"}, block
        assert block.marks.keys() <= MARKS, block


def test_what_is_not_run_says_why() -> None:
    reasons = {str(block): block.marks["not-run"] for block in all_blocks() if "not-run" in block.marks}
    assert {block: reason for block, reason in reasons.items() if reason not in ALLOWED_REASONS} == {}


def test_every_example_of_an_answer_is_held_against_one() -> None:
    compared = {id(answer) for chain in SHELL_CHAINS for block in chain for answer in block.answers}
    compared |= {id(block) for block in FETCHED}
    compared |= {id(block) for block in examples()}
    compared |= {id(block) for block in all_blocks() if (ROOT / block.marks.get("held-by", "nowhere")).is_file()}
    assert [str(block) for block in all_blocks() if block.language == "json" and id(block) not in compared] == []
    for block in all_blocks():
        if block.language == "json":
            json.loads(block.text)


def test_a_block_that_serves_does_so_last() -> None:
    for chain in SHELL_CHAINS:
        assert not any(block.serves for block in chain[:-1]), chain


def test_the_files_that_blocks_name_exist() -> None:
    for block in all_blocks():
        for path in re.findall(r"(?<![\w./-])(?:deploy|examples|benchmarks)/[\w.-]+", block.text):
            assert (ROOT / path).exists(), (str(block), path)


# --- the text --------------------------------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose_of(document), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(document)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_that_is_named_exists(document: Path) -> None:
    for span in re.findall(r"`([^`\n]+)`", prose_of(document)):
        top, _, rest = span.partition("/")
        if rest and re.fullmatch(r"[\w./-]+", span):
            assert top not in FOLDERS or (ROOT / span).exists(), span
            assert top not in PACKAGES or (ROOT / "gpu_worker_pool" / span).exists(), span


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE))
        assert {first or second for first, second in named} <= targets
