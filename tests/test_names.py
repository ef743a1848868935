"""One class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpu_worker_pool"


def classes_in(source: str) -> list[str]:
    """The names of the classes that a module defines, without the underscore of private ones."""
    return [node.name.lstrip("_") for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in sorted(PACKAGE.rglob("*.py")):
        for name in classes_in(module.read_text(encoding="utf-8")):
            places[name].append(str(module.relative_to(PACKAGE)))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_private_class_counts_as_well() -> None:
    assert classes_in("class A: ...\nclass _A: ...\n") == ["A", "A"]
