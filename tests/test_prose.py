"""Documents, comments, docstrings and messages keep to the words of the house: CONTRIBUTING.md, "How prose is written here".

A word list cannot tell good prose from bad. It finds the phrases that broke the rules most often, and suggests another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.blocks import ROOT, documents

# What to avoid, and what to write. A blank stands for any white space and quotes, so that a phrase is found across lines.
NAME_IT = "name the client, waiter, holder, caller, request, user or operator"
RULES: tuple[tuple[str, str], ...] = (
    (r"whoever|whomever|whosoever", NAME_IT),
    (r"somebody|someone|anybody|everybody", NAME_IT),
    (r"he|his|him|himself|she|her|hers|herself", "a program is it, a person is they"),
    (r"nobody is shown", "say who does not show what"),
    (
        r"(?:durable|reckoned|counted|meant|shown|told|kept) (?:is|are) (?:the|what|those|all|for)",
        "put the subject first",
    ),
    (r"reckon(?:s|ed|ing)?", "count, add up, plan with"),
    (r"(?<!there\s)(?:is|are) no (?!longer|more|less|other|different|reason)\w+", "is not a …"),
    (r"(?:is|are) possible", "must be …"),
    (r"anew", "again, or a new one"),
    (r"mend(?:s|ed|ing)?", "fix"),
    (r"signs? of life", "heartbeat, or renewal"),
    (r"(?:runs?|ran|running) out(?! of)", "expire"),
    (r"places? in (?:the )?(?:line|queue)", "queue position"),
    (r"(?:ahead|behind|first|next|stands?) in (?:the )?line", "… in the queue"),
    (r"look(?:s|ed|ing)? at (?:the |its |all |each )?(?:GPUs?|endpoints?|servers?)", "read, sample or poll"),
    (r'"{3}\w+ it\.?"{3}', "say the contract, or leave the docstring out"),
)


def pattern_of(avoid: str) -> re.Pattern[str]:
    spread = avoid.replace(" ", r"""[\s"']+""")
    return re.compile(rf"(?<!\w)(?:{spread})(?!\w)", re.IGNORECASE)


PATTERNS = [(pattern_of(avoid), instead) for avoid, instead in RULES]
# One look for all of them in small letters takes a sixth of the time, and most texts have none.
ANY_PATTERN = re.compile(pattern_of("|".join(avoid for avoid, _ in RULES)).pattern.lower())

# The promise is quoted to the letter.
PROMISE = "your lease runs out, or you die"

DOCUMENT_ROOTS = (
    *(str(document.relative_to(ROOT)) for document in documents()),
    *(".env.example", "Makefile", ".ci/run", "deploy", "examples", "run_examples.py", "scripts"),
)
CODE_ROOTS = ("benchmarks", "gpu_worker_pool")

CODE = frozenset({".py", ".js", ".html", ".css", ".sql"})
NOT_PROSE = frozenset({".pyc", ".svg", ".png"})


def faults(text: str) -> list[tuple[int, str, str]]:
    """The line, the phrase and what to write instead, for each phrase that breaks a rule."""
    text = pattern_of(PROMISE).sub(lambda match: re.sub(r"\S", "-", match[0]), text)
    if ANY_PATTERN.search(text.lower()) is None:
        return []
    found = [(match, instead) for pattern, instead in PATTERNS for match in pattern.finditer(text)]
    return sorted(
        (text.count("\n", 0, match.start()) + 1, re.sub(r"""["'\s]+""", " ", match[0]), instead)
        for match, instead in found
    )


def prose_in(path: Path) -> str:
    """What a reader reads of a file, with every line at its place."""
    text = path.read_text(encoding="utf-8")
    # What comments begin with, so that a phrase is found across their lines.
    return re.sub(r"(?m)^[ \t]*(?:#+|//|--|\*)", lambda match: " " * len(match[0]), text)


def files_of(root: str) -> Iterator[Path]:
    path = ROOT / root
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        is_wanted = file.suffix in CODE if root in CODE_ROOTS else file.suffix not in NOT_PROSE
        if is_wanted and file.is_file():
            yield file


@pytest.mark.parametrize("root", [*DOCUMENT_ROOTS, *CODE_ROOTS])
def test_prose_keeps_to_the_words_of_the_house(root: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {phrase!r}: {instead}"
        for file in files_of(root)
        for line, phrase, instead in faults(prose_in(file))
    ]
    assert found == [], "\n".join(["", *found])


# --- the test can fail -----------------------------------------------------------------------------------------------


def test_a_sentence_that_breaks_a_rule_is_found_and_one_that_keeps_them_is_not() -> None:
    broken = "The first in line gets it when he asks, without a sign\nof life; 'ten' is no number."
    assert [phrase for _, phrase, _ in faults(broken)] == ["first in line", "he", "sign of life", "is no number"]
    assert faults("A GPU is yours until you give it back, your lease runs out,\nor you die. There is no list.") == []
