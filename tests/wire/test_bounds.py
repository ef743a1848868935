"""Which characters a name may have."""

from __future__ import annotations

import re
import sys
import unicodedata

import pytest

from gpu_worker_pool.wire.bounds import PRINTABLE, is_printable

REFUSED = {"Cc", "Cf", "Zl", "Zp", "Cs"}


def test_no_character_that_is_invisible_or_turns_a_line_by_its_category_is_taken() -> None:
    taken = [
        f"{number:x}"
        for number in range(sys.maxunicode + 1)
        if unicodedata.category(chr(number)) in REFUSED and is_printable(f"a{chr(number)}")
    ]
    assert taken == []


@pytest.mark.parametrize(
    "number", [0xAD, 0x34F, 0x61C, 0x115F, 0x180B, 0x180E, 0x2800, 0x3164, 0xFE0F, 0xFFA0, 0xE0041, 0xE0101]
)
def test_nor_are_fillers_selectors_and_tags(number: int) -> None:
    assert not is_printable(f"ada{chr(number)}")
    assert re.search(PRINTABLE, f"ada{chr(number)}") is None


@pytest.mark.parametrize("text", ["", "ada", "Zoë", "李雷", "мария", "😀 GPU", "e\u0301", "نور", "a b\u00a0c"])
def test_names_of_people_and_plain_emoji_are(text: str) -> None:
    assert is_printable(text)
    assert re.search(PRINTABLE, text)
