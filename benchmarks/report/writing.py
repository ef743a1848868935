"""Write what was measured: the data, the plots and the documents that show both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.report.document import DETAILS as DETAILS_NAME
from benchmarks.report.document import DOCUMENT as DOCUMENT_NAME
from benchmarks.report.document import details, document
from benchmarks.report.measure import ROOT
from benchmarks.shared.results import to_json

DOCS = ROOT / "docs"
DOCUMENT, DETAILS = DOCS / DOCUMENT_NAME, DOCS / DETAILS_NAME
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


def write(run_data: dict[str, Any], data: Path, docs: Path) -> None:
    """Write the data, the plots, and the documents that show both."""
    docs.mkdir(parents=True, exist_ok=True)
    data.write_text(to_json(run_data), encoding="utf-8")
    run_data["plots_skipped"] = draw(data, docs / IMAGES)
    data.write_text(to_json(run_data), encoding="utf-8")
    for path, text in ((docs / DOCUMENT.name, document(run_data)), (docs / DETAILS.name, details(run_data))):
        path.write_text(text, encoding="utf-8")
    print(f"\nWritten: {docs / DOCUMENT.name} and {DETAILS.name}, from {data}")


def stored() -> dict[str, Any]:
    """Return the data of the last run."""
    known: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return known


def stored_soak() -> dict[str, Any] | None:
    """Return the summary of the last soak, if there is one."""
    return stored().get("soak") if DATA.exists() else None
