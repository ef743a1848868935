"""An NvmlProbe in a process of its own, because ctypes loads libnvidia-ml.so.1 once per process.

Run as a program it is the child: it makes the probe and speaks JSON lines. `NvmlProbeInChild` is the other end, itself a
probe.

    → look 12.5      ← {"readings": [...], "error": null}
    → close          ← {"closed": true}

The first line is {"source": "nvml"}, or {"unavailable": "..."} and the child ends. What is raised is {"raised": "..."}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.gpus.nvml import NvmlProbe
from gpu_worker_pool.gpus.probe import Probe, ProbeResult, ProbeUnavailable
from tests.gpus.stub_nvml import LIBRARY
from tests.preloaded import PreloadedPopen

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 30


class NvmlProbeInChild(Probe):
    """Raises ProbeUnavailable as NvmlProbe does, and RuntimeError with the words of whatever else the child raised."""

    def __init__(self, node: str, environment: Mapping[str, str]) -> None:
        # A fork of a process that has everything loaded cannot read LD_LIBRARY_PATH any more: it is told the folder.
        folder = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)[0]
        command = [sys.executable, "-m", "tests.gpus.nvml_driver", node, folder]
        own = {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}
        env = {**os.environ, "PYTHONPATH": str(ROOT), **own}
        pipe = subprocess.PIPE
        self.process = PreloadedPopen(command, env=env, stdin=pipe, stdout=pipe, bufsize=0, cwd=ROOT)
        hello = self._receive()
        if "unavailable" in hello:
            self.end()
            raise ProbeUnavailable(hello["unavailable"])
        self.source = hello["source"]

    def read(self, at: float) -> ProbeResult:
        answer = self.ask(f"look {at!r}")
        return ProbeResult(tuple(map(_reading, answer["readings"])), answer["error"])

    def close(self) -> None:
        self.ask("close")

    def end(self) -> None:
        """End the process; the probe need not be closed before."""
        self.process.kill()
        self.process.communicate()

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())
        answer = self._receive()
        if "raised" in answer:
            raise RuntimeError(answer["raised"])
        return answer

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.end()
            raise AssertionError(f"the probe's process ended or did not answer in {PATIENCE_S} s; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _reading(data: dict[str, Any]) -> Reading:
    gpu = data.pop("gpu")
    processes = data.pop("processes")
    return Reading(
        gpu=Gpu(GpuKey(*gpu["key"]), gpu["index"], gpu["name"], gpu["position"]),
        processes=None if processes is None else tuple(map(_process, processes)),
        **data,
    )


def _process(data: dict[str, Any]) -> GpuProcess:
    ancestors = tuple(ProcessId(*ancestor) for ancestor in data["ancestors"])
    return GpuProcess(ProcessId(*data["id"]), data["memory_mb"], data["name"], ancestors)


def main(node: str, folder: str) -> None:
    warnings.simplefilter("error")
    if folder:
        # The loader gives it to every caller that asks for its name from now on, as it does for one on LD_LIBRARY_PATH.
        ctypes.CDLL(f"{folder}/{LIBRARY}")
    try:
        probe = NvmlProbe(node)
    except ProbeUnavailable as unavailable:
        _send({"unavailable": str(unavailable)})
        return
    _send({"source": probe.source})
    for line in sys.stdin:
        try:
            _send(_answer(probe, line.split()))
        except Exception as error:  # noqa: BLE001 - the test is told, and judges
            _send({"raised": f"{type(error).__name__}: {error}"})


def _answer(probe: NvmlProbe, words: list[str]) -> dict[str, Any]:
    match words:
        case ["look", at]:
            return asdict(probe.read(float(at)))
        case ["close"]:
            probe.close()
            return {"closed": True}
    raise ValueError(f"what is {words}?")


def _send(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
