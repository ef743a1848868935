"""A libnvidia-ml.so.1 for tests, on a machine without a GPU: real nvidia-ml-py talks to it, in a process of its own.

library = build(tmp_path)                              # None where there is no C compiler
config = StubConfig(tmp_path / "nvml.conf", [StubGpu.numbered(0), StubGpu.numbered(1)])
config.write()
subprocess.Popen(..., env={**os.environ, **config.environment(library)})
config.gpus[0].utilization_percent = 80
config.write()                                         # and from now on the process sees it
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml_stub.c"
LIBRARY = "libnvidia-ml.so.1"
MOST_MIG_DEVICES = 7


class NvmlCode(IntEnum):
    """What NVML can answer, by the names and numbers of nvml.h."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


def build(folder: Path) -> Path | None:
    """Compile the stub into this folder; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / LIBRARY
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library


@dataclass
class StubGpu:
    """A GPU or a MIG device. None is not supported. Processes are pid: MiB, where None is memory that is unknown."""

    name: str | None
    uuid: str | None
    memory_total_mb: float | None = 81920
    memory_reserved_mb: float | None = 600
    memory_used_mb: float | None = 0
    utilization_percent: float | None = 0
    temperature_c: float | None = 35
    power_draw_w: float | None = 60
    power_limit_w: float | None = 400
    compute: dict[int, float | None] | None = field(default_factory=dict)
    graphics: dict[int, float | None] | None = field(default_factory=dict)
    error: int | None = None
    """What everything that is asked of this GPU answers."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """What single calls answer, by the names in nvml_stub.c ("GetMemoryInfo_v2")."""
    ancestors: dict[int, int] = field(default_factory=dict)
    """What it has in common with each GPU of a higher index: a level of NVML's topology."""
    nvlinks: dict[int, int] = field(default_factory=dict)
    """What NVML says of NVLink to each GPU of a higher index: 0 is a link."""
    mig: dict[int, StubGpu] | None = None
    """Its MIG devices by position: MIG is on. None: it does not know MIG."""

    @classmethod
    def numbered(cls, index: int, name: str = "NVIDIA A100-SXM4-80GB") -> StubGpu:
        """An idle GPU with a UUID made from its number."""
        return cls(name, f"GPU-{index:08d}-0000-0000-0000-000000000000")

    @classmethod
    def mig_device(cls, parent: int, position: int, name: str | None = "NVIDIA A100-SXM4-80GB MIG 1g.10gb") -> StubGpu:
        """An idle MIG device, which tells of its memory and its processes only, as in NVML."""
        return cls(
            name,
            f"MIG-{parent:08d}-0000-0000-0000-{position:012d}",
            memory_total_mb=9728,
            memory_reserved_mb=0,
            utilization_percent=None,
            temperature_c=None,
            power_draw_w=None,
            power_limit_w=None,
        )

    def lines(self, prefix: str) -> list[str]:
        lines = _error_lines(prefix, self.error, self.errors)
        for key in (
            "name",
            "uuid",
            "memory_total_mb",
            "memory_reserved_mb",
            "memory_used_mb",
            "utilization_percent",
            "temperature_c",
            "power_draw_w",
            "power_limit_w",
        ):
            value = getattr(self, key)
            if value is not None:
                lines.append(f"{prefix}{key}={value}")
        for key, processes in (("compute", self.compute), ("graphics", self.graphics)):
            if processes is not None:
                listed = ",".join(f"{pid}:{'-' if mb is None else mb}" for pid, mb in processes.items())
                lines.append(f"{prefix}{key}={listed}")
        lines += [f"{prefix}ancestor.{other}={level}" for other, level in self.ancestors.items()]
        lines += [f"{prefix}nvlink.{other}={status}" for other, status in self.nvlinks.items()]
        if self.mig is not None:
            lines += [f"{prefix}mig=1", f"{prefix}mig_max={MOST_MIG_DEVICES}"]
            for position, device in self.mig.items():
                lines += device.lines(f"{prefix}mig.{position}.")
        return lines


@dataclass
class StubConfig:
    """What the stub answers, in a file that it reads at every call. Change it and `write()` it, also while it is read."""

    path: Path
    gpus: list[StubGpu] = field(default_factory=list)
    error: int | None = None
    """What every call answers: DRIVER_NOT_LOADED is a driver that was unloaded."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """What single calls answer, on all GPUs."""
    generation: int = 0
    """Another number is a driver that was restarted: NVML is to be initialised anew, and handles are invalid."""

    def write(self) -> None:
        """Write it at once: the stub sees all of it or what was before."""
        lines = [*_error_lines("", self.error, self.errors), f"generation={self.generation}", f"gpus={len(self.gpus)}"]
        for index, gpu in enumerate(self.gpus):
            lines += gpu.lines(f"gpu.{index}.")
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        beside.replace(self.path)

    @property
    def log(self) -> Path:
        """Where the stub writes down what it is asked."""
        return self.path.with_name(f"{self.path.name}.log")

    def calls(self) -> list[str]:
        """What the stub was asked since this was last asked."""
        if not self.log.exists():
            return []
        calls = self.log.read_text(encoding="utf-8").splitlines()
        self.log.unlink()
        return calls

    def environment(self, library: Path) -> dict[str, str]:
        """The variables with which a process finds this stub and this configuration, to put over its own."""
        folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(folders),
            "NVML_STUB_CONFIG": str(self.path),
            "NVML_STUB_LOG": str(self.log),
        }


def _error_lines(prefix: str, error: int | None, errors: Mapping[str, int]) -> list[str]:
    every = [] if error is None else [f"{prefix}error={error:d}"]
    return every + [f"{prefix}error.{call}={code:d}" for call, code in errors.items()]
