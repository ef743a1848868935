"""Puts the GPUs of a machine on a line, so that GPUs with a fast link between them are close.

GPUs that are all near each other are an island: those on one PCIe switch, for example. Islands make larger islands: those of
one NUMA node. The closest GPUs have the same position, and the gap between two islands is wider than either of them. So a
choice of the closest positions stays on an island as long as it has room there.
"""

from __future__ import annotations

from collections.abc import Mapping

# How far two GPUs are from each other, by their numbers, the lower one first.
Distances = Mapping[tuple[int, int], int]
# The GPUs of an island, with their positions on it.
Island = dict[int, int]


def positions(number: int, distances: Distances) -> Island:
    """The positions of this number of GPUs."""
    islands: list[Island] = [{gpu: 0} for gpu in range(number)]
    gap = 0
    for farthest in sorted(set(distances.values())):
        groups: list[list[Island]] = []
        for island in islands:
            near = (group for group in groups if all(_are_near(island, each, distances, farthest) for each in group))
            group = next(near, None)
            if group is None:
                groups.append([island])
            else:
                group.append(island)
        islands = [_in_a_row(group, gap) for group in groups]
        gap = max(max(island.values()) for island in islands) + 1
    return _in_a_row(islands, gap)


def _are_near(one: Island, other: Island, distances: Distances, farthest: int) -> bool:
    return all(distances[min(a, b), max(a, b)] <= farthest for a in one for b in other)


def _in_a_row(islands: list[Island], gap: int) -> Island:
    row: Island = {}
    start = 0
    for island in islands:
        row |= {gpu: start + position for gpu, position in island.items()}
        start += max(island.values()) + gap
    return row
