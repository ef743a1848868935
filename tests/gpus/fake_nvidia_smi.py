"""A stand-in for `nvidia-smi`: an executable that prints, hangs and fails as a file says, which may change while it runs.

`install(folder)` puts it into a folder as `nvidia-smi`; put that folder on the PATH. What it does is read at every run
from the file that FAKE_NVIDIA_SMI_CONFIG names (without it, from `nvidia-smi.json` beside the executable):

    {"gpus": ANSWER, "processes": ANSWER}, for --query-gpu and --query-compute-apps, each with these, all optional:

    print            text for the standard output        print_error   text for the error output
    print_endlessly  true: goes on printing              exit_code     a number, 0 without it
    hang             true: hangs for ever, after printing; only it does not outlive who runs it
    child            "holds the pipe": a child that stays, in the same process group, and outlives its parent
                     "escapes": the same in a session of its own
                     "clings": the same, and it traces its parent, which can then be killed but not waited for

Every run is noted as a line of JSON in `nvidia-smi.runs` beside the configuration. Only the standard library is used,
and little of it, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

CONFIG = "FAKE_NVIDIA_SMI_CONFIG"


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
    fake.command.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
    fake.command.chmod(0o755)
    fake.say({"print": "No devices were found\n", "exit_code": 6})
    return fake


# --- the script ----------------------------------------------------------------------------------------------------


def main() -> int:
    config = os.environ.get(CONFIG) or str(Path(__file__).with_name("nvidia-smi.json"))
    answers = json.loads(Path(config).read_text())
    answer = answers["gpus" if sys.argv[1].startswith("--query-gpu") else "processes"]
    child_pid = start_child(answer["child"]) if "child" in answer else None
    run = {"arguments": sys.argv[1:], "lc_all": os.environ.get("LC_ALL"), "pid": os.getpid(), "child_pid": child_pid}
    with Path(config).with_suffix(".runs").open("a") as runs:
        runs.write(json.dumps(run) + "\n")
    sys.stdout.buffer.write(answer.get("print", "").encode())
    sys.stdout.flush()
    sys.stderr.write(answer.get("print_error", ""))
    sys.stderr.flush()
    while answer.get("print_endlessly"):
        sys.stdout.write("no end is in sight\n" * 1000)
    if answer.get("hang"):
        die_with_parent()
    while answer.get("hang"):
        signal.pause()
    return int(answer.get("exit_code", 0))


def start_child(kind: str) -> int:
    """Its pid, once it does what it is there for."""
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        if kind != "holds the pipe":
            os.setsid()
        os.close(done)
        os.write(tell, trace_parent().encode() if kind == "clings" else b"ready")
        os.close(tell)
        while True:
            signal.pause()
    os.close(tell)
    if kind == "clings":
        allow_tracing_by(pid)
    told = os.read(done, 100)
    if told != b"ready":
        sys.exit(f"fake nvidia-smi: the child could not start: {told.decode()}")
    return pid


def die_with_parent() -> None:
    """So that a server that is killed in a test while this one hangs leaves nothing behind."""
    import ctypes  # noqa: PLC0415 - slow to import, and seldom needed

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


def allow_tracing_by(pid: int) -> None:
    import ctypes  # noqa: PLC0415 - slow to import, and seldom needed

    pr_set_ptracer = 0x59616D61
    ctypes.CDLL(None).prctl(pr_set_ptracer, pid, 0, 0, 0)


def trace_parent() -> str:
    """Seize it; "ready", or what the kernel says against it."""
    import ctypes  # noqa: PLC0415 - slow to import, and seldom needed

    ptrace_seize = 0x4206
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    refused = 0 if libc.ptrace(ptrace_seize, os.getppid(), None, None) == 0 else ctypes.get_errno()
    return f"cannot trace: {os.strerror(refused)}" if refused else "ready"


if __name__ == "__main__":
    sys.exit(main())
