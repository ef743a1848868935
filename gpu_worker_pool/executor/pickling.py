"""Calls as they are sent to a worker. A worker finds a function by its name, which it cannot in a notebook."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

from .spawning import is_typed_in


def pickled_call(function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """The call; what was typed in goes as it is, by cloudpickle. PicklingError says what to do where that is missing."""
    if not is_typed_in():
        return bytes(ForkingPickler.dumps((function, args, kwargs)))
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        _check_can_be_found(function)
        return bytes(ForkingPickler.dumps((function, args, kwargs)))
    pickled: bytes = cloudpickle.dumps((function, args, kwargs))
    return pickled


def _check_can_be_found(function: Callable[..., Any]) -> None:
    # map wraps it.
    inner = getattr(function, "args", None) or (function,)
    typed = next((one for one in (function, *inner) if getattr(one, "__module__", None) == "__main__"), None)
    if typed is not None:
        name = getattr(typed, "__qualname__", repr(typed))
        raise PicklingError(
            f"{name} was defined in a notebook or an interactive session, where a worker cannot load it; put it into a module "
            "and import it, or install cloudpickle"
        )
