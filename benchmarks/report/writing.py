"""Write what was measured: the data, the plots and the document that shows both."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.report.document import document
from benchmarks.report.measure import ROOT
from benchmarks.shared.results import to_json

DOCUMENT = ROOT / "docs" / "BENCHMARKS.md"
DATA = ROOT / "benchmarks" / "measured.json"
IMAGES = "images"


def draw(data: Path, images: Path) -> str:
    """Remove the old plots and draw new ones. Returns why there are no plots, or an empty text if they are drawn."""
    for old in images.glob("bench-*.svg"):
        old.unlink()
    command = ["-m", "benchmarks.report.plots", str(data), str(images)]
    try:
        subprocess.run([str(peers.python_with("matplotlib")), *command], cwd=ROOT, check=True, timeout=300)
    except peers.MissingError as missing:
        return str(missing)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"matplotlib failed: {type(error).__name__}"
    return ""


def write(run_data: dict[str, Any], data: Path, text: Path) -> None:
    """Write the data, the plots, and the document that shows both."""
    text.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(to_json(run_data), encoding="utf-8")
    run_data["plots_skipped"] = draw(data, text.parent / IMAGES)
    data.write_text(to_json(run_data), encoding="utf-8")
    text.write_text(document(run_data), encoding="utf-8")
    print(f"\nWritten: {text}, from {data}")
