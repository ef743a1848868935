"""What the documents show must work."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import RunningServer

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(ROOT.glob("*.md"))


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


BLOCKS = [(document.name, block) for document in DOCUMENTS for block in python_blocks(document)]


def test_the_readme_shows_the_api() -> None:
    assert any(name == "README.md" for name, _ in BLOCKS)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_python_block_prints_what_it_says(name: str, block: str) -> None:
    printed = io.StringIO()
    # The server that the blocks expect on this machine is a real one, on another port.
    with RunningServer({"SIMULATED_GPUS": "4xA100-80GB"}) as server, contextlib.redirect_stdout(printed):
        code = block.replace("http://localhost:8000", server.url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPU_SERVICE_ENDPOINT", server.url)
            exec(compile(code, name, "exec"), {"__name__": "__main__"})  # noqa: S102 - our own document

    promised = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    assert printed.getvalue().splitlines() == promised


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_to_a_file_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE))
        assert {first or second for first, second in named} <= targets


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_the_readme_work_one_after_the_other() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("curl ")]
    assert len(lines) >= 6
    with RunningServer({"SIMULATED_GPUS": "4xA100-80GB"}) as server:
        for line in lines:
            command = shlex.split(line.replace("localhost:8000", f"127.0.0.1:{server.port}"), comments=True)
            done = subprocess.run([*command, "-sS", "--fail-with-body", "-m", "20"], capture_output=True, check=False)
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            assert json.loads(done.stdout), line
