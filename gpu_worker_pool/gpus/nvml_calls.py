"""Calls of NVML through nvidia-ml-py. A problem is one of the driver, of a GPU or of the call."""

from __future__ import annotations

import importlib
from enum import IntEnum
from types import ModuleType
from typing import Any

from .probe import ProbeUnavailable


class Code(IntEnum):
    """The NVML return codes that matter here. The numbers are fixed in nvml.h."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    UNKNOWN = 999


_MEANS_THE_DRIVER_IS_GONE = frozenset(
    {Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIBRARY_NOT_FOUND, Code.LIB_RM_VERSION_MISMATCH}
)
_MEANS_THE_GPU_IS_GONE = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED})
_MEANS_ANOTHER_VERSION_MAY_DO = frozenset(
    {
        Code.FUNCTION_NOT_FOUND,
        Code.ARGUMENT_VERSION_MISMATCH,
        Code.DEPRECATED,
        Code.NOT_SUPPORTED,
        Code.INVALID_ARGUMENT,
    }
)

_DRIVER_IN_WORDS: dict[int, str] = {
    Code.UNINITIALIZED: "NVML was shut down under this process, as when the NVIDIA driver is restarted",
    Code.NO_PERMISSION: "NVML may not be used by this user: give it access to /dev/nvidia*",
    Code.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it (modprobe nvidia), or in a container pass the GPUs in",
    Code.LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: install the NVIDIA driver, or in a container pass the GPUs in",
    Code.LIB_RM_VERSION_MISMATCH: "the loaded NVIDIA driver and this process's libnvidia-ml.so.1 are of different versions, "
    "as after an update of the driver: load the new driver or reboot, then restart this process",
}
_GPU_IN_WORDS: dict[int, str] = {
    Code.NO_PERMISSION: "this user may not use it: give it access to /dev/nvidia{index}",
    Code.INSUFFICIENT_POWER: "its power cables are not attached properly",
    Code.GPU_IS_LOST: "it is lost: it fell off the bus or does not answer; a reboot may bring it back",
    Code.RESET_REQUIRED: "it must be reset before it can be used again: nvidia-smi --gpu-reset -i {index}, or reboot",
}


class NvmlError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class DriverGoneError(NvmlError):
    """NVML as a whole does not answer."""


class GpuFaultError(NvmlError):
    """This GPU does not answer; the others may."""


class RefusedError(NvmlError):
    """NVML refused this one call."""


class Nvml:
    """The functions of pynvml by name. Their errors are classified: driver, GPU, or call."""

    def __init__(self) -> None:
        try:
            # Imported late and by name: only the server installs it, and it has no types.
            self._bindings: ModuleType = importlib.import_module("pynvml")
        except ImportError:
            advice = "NVML cannot be used without nvidia-ml-py: pip install 'gpu-worker-pool[server]'"
            raise ProbeUnavailable(advice) from None

    def constant(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def ask(self, *call: Any) -> Any | None:
        """The answer; None if the call is refused."""
        return self.ask_first(call)

    def ask_first(self, *calls: tuple[Any, ...]) -> Any | None:
        """The first answer of these calls; None if all are refused."""
        try:
            return self.demand_first(*calls)
        except RefusedError:
            return None

    def demand_first(self, *calls: tuple[Any, ...]) -> Any:
        """The answer to the first of these calls that the driver knows."""
        refusals: list[RefusedError] = []
        for call in calls:
            try:
                return self.demand(*call)
            except RefusedError as refused:
                refusals.append(refused)
                if refused.code not in _MEANS_ANOTHER_VERSION_MAY_DO:
                    break
        # A missing function says nothing about the GPU.
        raise next((refused for refused in refusals if refused.code != Code.FUNCTION_NOT_FOUND), refusals[-1])

    def demand(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._bindings, name, None)
        if function is None:
            raise RefusedError(Code.FUNCTION_NOT_FOUND, f"this pynvml has no {name}")
        try:
            return function(*arguments)
        except self._bindings.NVMLError as error:
            code: int = error.value
            if code in _MEANS_THE_DRIVER_IS_GONE:
                raise DriverGoneError(code, _DRIVER_IN_WORDS[code]) from None
            kind = GpuFaultError if code in _MEANS_THE_GPU_IS_GONE else RefusedError
            raise kind(code, str(error)) from None
        except UnicodeDecodeError:
            raise RefusedError(Code.UNKNOWN, f"the answer of {name} is not text") from None

    def demand_of_driver(self, name: str) -> Any:
        """The answer to a call about no GPU; any problem is one of the driver."""
        try:
            return self.demand(name)
        except NvmlError as problem:
            words = _DRIVER_IN_WORDS.get(problem.code, f"NVML does not work: {problem}")
            raise DriverGoneError(problem.code, words) from None


def fault_in_words(problem: NvmlError, index: int) -> str:
    return _GPU_IN_WORDS.get(problem.code, f"it cannot be read: {problem}").format(index=index)
