"""CUDA in this process: which GPUs CUDA_VISIBLE_DEVICES shows it, and whether it has begun."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpu_worker_pool.core.model.request import as_gpu_names

_SEPARATORS = re.compile(r"[,\s]+")
_QUOTES = "\"'"
_INDEX = re.compile(r"-?[0-9]+")
_UUID_PREFIX = re.compile(r"(?:gpu|mig)-[\w./:-]+", re.ASCII | re.IGNORECASE)
_HIDES_THE_REST = frozenset({"-1", "nodevfiles"})
_LONGEST_QUOTE = 60


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    indices: tuple[int, ...]
    """System indices of the GPUs to show, ascending."""
    is_filtering: bool
    """False if all GPUs are shown because the variable is not set, or names no GPU that is there."""
    warnings: tuple[str, ...] = ()


def select_visible(value: str | None, gpus: Sequence[InstalledGpu]) -> VisibleDevices:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES shows.

    None (not set) shows all; an empty value shows none. Any other value is a list of indices, UUIDs and unambiguous
    prefixes of UUIDs, separated by commas or white space. `-1` and `NoDevFiles` hide everything that follows, as in
    CUDA. Unlike CUDA, an invalid name is skipped with a warning, and if no valid name is left all GPUs are shown.
    Quotes around the value or a name are ignored: Docker's env files pass them on.
    """
    everything = tuple(sorted({gpu.index for gpu in gpus}))
    if value is None:
        return VisibleDevices(everything, is_filtering=False)

    names, is_rest_hidden = names_in(value)
    chosen: set[int] = set()
    warnings: list[str] = []
    for name in names:
        found = _find(name, gpus)
        if isinstance(found, str):
            warnings.append(found)
        elif found.index in chosen:
            warnings.append(f"GPU {found.index} is named more than once in CUDA_VISIBLE_DEVICES")
        else:
            chosen.add(found.index)

    if names and not chosen and not is_rest_hidden:
        warnings.append(f"CUDA_VISIBLE_DEVICES={_shortened(value)!r} names no GPU of this system, so all are shown")
        return VisibleDevices(everything, is_filtering=False, warnings=_without_repetition(warnings))
    return VisibleDevices(tuple(sorted(chosen)), is_filtering=True, warnings=_without_repetition(warnings))


def names_in(value: str) -> tuple[list[str], bool]:
    """Return the names in a value up to one that hides the rest, and whether there was one."""
    names: list[str] = []
    for name in (part.strip(_QUOTES) for part in _SEPARATORS.split(value)):
        if name.lower() in _HIDES_THE_REST:
            return names, True
        if name:
            names.append(name)
    return names, False


def gpu_names_in(value: str) -> tuple[str, ...]:
    """Return the GPUs that a value names, present or not, as a request names them; other names are skipped."""
    named: list[str] = []
    for name in names_in(value)[0]:
        with suppress(ValueError):
            named += as_gpu_names([name])
    return tuple(named)


def _find(name: str, gpus: Sequence[InstalledGpu]) -> InstalledGpu | str:
    if _INDEX.fullmatch(name):
        # Compared as text: Python does not convert numbers of thousands of digits.
        digits = name.lstrip("0") or "0"
        candidates = [gpu for gpu in gpus if str(gpu.index) == digits]
    elif _UUID_PREFIX.fullmatch(name):
        prefix = name.lower()
        candidates = [gpu for gpu in gpus if gpu.uuid.lower().startswith(prefix)]
        candidates = [gpu for gpu in candidates if gpu.uuid.lower() == prefix] or candidates
    else:
        return f"{_shortened(name)!r} in CUDA_VISIBLE_DEVICES is neither a GPU index nor a GPU UUID"

    if not candidates:
        return f"GPU {_shortened(name)} in CUDA_VISIBLE_DEVICES not found on system"
    if len(candidates) > 1:
        indices = ", ".join(str(gpu.index) for gpu in candidates)
        return f"GPU {_shortened(name)} in CUDA_VISIBLE_DEVICES is ambiguous: it could be any of GPUs {indices}"
    return candidates[0]


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def _without_repetition(warnings: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(warnings))


def has_initialized_cuda() -> bool:
    """Whether this process has the device open that CUDA or ROCm, of any framework, opens when it is initialized."""
    folder = "/proc/self/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - pathlib loads much, and every client has this
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"{folder}/{name}").endswith(("/nvidia-uvm", "/dev/kfd")):  # noqa: PTH115 - the same
                    return True
    return False
