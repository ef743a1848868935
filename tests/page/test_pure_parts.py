"""The pure parts of the page by themselves, in Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("pure.test.mjs")


def test_the_pure_parts_of_the_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node: apt-get install nodejs")
    ran = subprocess.run([node, "--test", str(TESTS)], capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
