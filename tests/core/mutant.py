"""A copy of the core in which one rule is missing."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import gpu_worker_pool.core
from tests.core.harness import Core

CORE = Path(gpu_worker_pool.core.__file__).parent
# The name of the copy.
NAME = "mutant_core"


@dataclass(frozen=True)
class Mutant:
    """A rule, and the core without it."""

    rule: str
    module: str
    text: str
    instead: str
    also: tuple[str, str, str] | None = None

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        return [(self.module, self.text, self.instead), *([self.also] if self.also else [])]


def read_mutants(table: str) -> tuple[Mutant, ...]:
    """The mutants of a table: a line with the rule and the module, the text behind `-`, and what stands there instead behind `+`."""
    found: list[tuple[str, list[tuple[str, list[str], list[str]]]]] = []
    for line in table.strip("\n").split("\n"):
        if line.startswith(("-", "+")):
            _, text, instead = found[-1][1][-1]
            (text if line[0] == "-" else instead).append(line[1:])
            continue
        rule, _, module = line.rpartition(": ")
        if rule != "also":
            found.append((rule, []))
        found[-1][1].append((module, [], []))
    made = []
    for rule, parts in found:
        first, *more = [(module, "\n".join(text), "\n".join(instead)) for module, text, instead in parts]
        made.append(Mutant(rule, *first, also=more[0] if more else None))
    return tuple(made)


class _Copy(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the modules of the copy, some of them with another text."""

    def __init__(self, changed: dict[str, str]) -> None:
        self._changed = changed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _sources():
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        return _file(fullname).name == "__init__.py"

    def get_source(self, fullname: str) -> str:
        return self._changed.get(fullname, _sources()[fullname])

    def get_code(self, fullname: str) -> CodeType:
        return _compiled(self.get_source(fullname), str(_file(fullname)))


@contextmanager
def loaded(mutant: Mutant) -> Iterator[Core]:
    """The mutant. Only the modules that were changed, and those that import them, are loaded again for it."""
    whole, changed = _whole_copy(), dict[str, str]()
    for module, text, instead in mutant.changes:
        (name,) = (name for name in _sources() if name.endswith("." + module.replace("/", ".")))
        source = changed.get(name, _sources()[name])
        assert source.count(text) == 1, "the text to replace must stand in the module just once"
        changed[name] = source.replace(text, instead)
    again = _with_importers(set(changed))
    try:
        for name in whole:
            if name in again:
                _forget(name)
            else:
                _put(name, whole[name])
        yield _load(_Copy(changed))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            _forget(name)


@cache
def _whole_copy() -> dict[str, ModuleType]:
    _load(_Copy({}))
    return {name: module for name, module in sys.modules.items() if name in _sources()}


def _load(copy: _Copy) -> Core:
    sys.meta_path.insert(0, copy)
    try:
        return Core(NAME)
    finally:
        sys.meta_path.remove(copy)


def _put(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    if package:
        setattr(sys.modules[package], leaf, module)


def _forget(name: str) -> None:
    sys.modules.pop(name, None)
    package, _, leaf = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(leaf, None)


@cache
def _sources() -> dict[str, str]:
    """What a module of the copy imports must be of the copy, too."""
    paths = {path: path.relative_to(CORE.parent).with_suffix("").parts for path in CORE.rglob("*.py")}
    names = {path: ".".join([NAME, *parts[1:]]).removesuffix(".__init__") for path, parts in paths.items()}
    return {
        name: path.read_text(encoding="utf-8").replace("gpu_worker_pool.core.", f"{NAME}.")
        for path, name in names.items()
    }


def _file(name: str) -> Path:
    path = CORE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _compiled(source: str, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


@cache
def _imported_by(name: str) -> frozenset[str]:
    """The modules of the copy that it names in an import; a package has none but those of its own file."""
    package = name if _file(name).name == "__init__.py" else name.rpartition(".")[0]
    found = set[str]()
    for node in ast.walk(ast.parse(_sources()[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return frozenset(found & _sources().keys())


def _with_importers(changed: set[str]) -> set[str]:
    found = set(changed)
    while more := {name for name in _sources() if name not in found and _imported_by(name) & found}:
        found |= more
    # What a package imports, all of its modules may have.
    return set(_sources()) if any(_file(name).name == "__init__.py" for name in found) else found
