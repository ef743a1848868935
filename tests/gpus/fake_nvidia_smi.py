"""A stand-in for `nvidia-smi`: an executable that prints, hangs and fails as a file says, which may change while it runs.

`install(folder)` puts it into a folder as `nvidia-smi`; put that folder on the PATH. What it does is read at every run
from the file that FAKE_NVIDIA_SMI_CONFIG names (without it, from `nvidia-smi.json` beside the executable):

    {"gpus": ANSWER, "processes": ANSWER}, for --query-gpu and --query-compute-apps, each with these, all optional:

    print            text for the standard output        print_error   text for the error output
    exit_code        a number, 0 without it
    hang             true: hangs for ever, after printing; only it does not outlive who runs it
    child            "holds the pipe": a child that stays, in the same process group, and outlives its parent
                     "escapes": the same in a session of its own
                     "clings": the same, and it traces its parent, which can then be killed but not waited for

Every run is noted as a line of JSON in `nvidia-smi.runs` beside the configuration. nvidia_smi_script.py is what is run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.gpus import nvidia_smi_script
from tests.gpus.nvidia_smi_script import CONFIG


class FakeNvidiaSmi:
    """An installed one. `say` changes what it does from its next run on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = folder / "nvidia-smi"
        self.config = folder / "nvidia-smi.json"
        self._runs = folder / "nvidia-smi.runs"

    def environment(self) -> dict[str, str]:
        """What the process that is to run it needs in its environment."""
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}", CONFIG: str(self.config)}

    def say(self, gpus: str | dict[str, Any], processes: str | dict[str, Any] = "") -> None:
        """Answer so; a text is printed, a dictionary is an ANSWER."""
        both = {"gpus": gpus, "processes": processes}
        answers = {name: {"print": answer} if isinstance(answer, str) else answer for name, answer in both.items()}
        written = self.config.with_suffix(".new")
        written.write_text(json.dumps(answers))
        written.replace(self.config)  # in one step: a run in between reads the old one or the new one

    def runs(self) -> list[dict[str, Any]]:
        """All runs so far: `arguments`, `lc_all`, `pid`, `child_pid`."""
        return [json.loads(line) for line in self._runs.read_text().splitlines()] if self._runs.exists() else []


def install(folder: Path) -> FakeNvidiaSmi:
    """Put one into this folder. It shows no GPU until it is told what to `say`."""
    fake = FakeNvidiaSmi(folder)
    # Isolated and without site-packages it starts in a few milliseconds.
    fake.command.write_text(f"#!{sys.executable} -IS\n{Path(nvidia_smi_script.__file__).read_text()}")
    fake.command.chmod(0o755)
    fake.say({"print": "No devices were found\n", "exit_code": 6})
    return fake
