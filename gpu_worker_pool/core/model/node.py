"""A node: a machine with GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import InventoryGpu


@dataclass(frozen=True, slots=True)
class Node:
    """What the journal knows of a node. `gpus` is its inventory and `machine_id` the box, None while that is unknown."""

    boot_id: str
    gpus: tuple[InventoryGpu, ...] | None = None
    machine_id: str | None = None
