"""What is run as `nvidia-smi` in tests (see fake_nvidia_smi.py).

Only the standard library is used, and little of it (no pathlib, no typing), because it is started hundreds of times.
"""

# ruff: noqa: PTH123

from __future__ import annotations

import json
import os
import signal
import sys

CONFIG = "FAKE_NVIDIA_SMI_CONFIG"


def main() -> int:
    config = os.environ.get(CONFIG) or f"{__file__}.json"
    with open(config, encoding="utf-8") as file:
        answers = json.load(file)
    answer = answers["gpus" if sys.argv[1].startswith("--query-gpu") else "processes"]
    child_pid = start_child(answer["child"]) if "child" in answer else None
    run = {"arguments": sys.argv[1:], "lc_all": os.environ.get("LC_ALL"), "pid": os.getpid(), "child_pid": child_pid}
    with open(f"{config.removesuffix('.json')}.runs", "a", encoding="utf-8") as runs:
        runs.write(json.dumps(run) + "\n")
    sys.stdout.buffer.write(answer.get("print", "").encode())
    sys.stdout.flush()
    sys.stderr.write(answer.get("print_error", ""))
    sys.stderr.flush()
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
