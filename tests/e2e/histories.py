"""Reads the histories that the processes of a run left in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.run_history import Line, RunHistory

# 80 % (the threshold) of a simulated A100 with 80 GB.
USABLE_MB = 0.8 * 81920


def read(folder: Path) -> RunHistory:
    lines = [line for path in folder.glob("*.history") for line in _json_lines(path)]
    resources = {path.stem: _json_lines(path) for path in folder.glob("*.resource")}
    return RunHistory(lines, resources, USABLE_MB)


def _json_lines(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
