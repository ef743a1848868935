"""How a cost grows: the power of the size that fits best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping


def exponent(costs: Mapping[int, float]) -> float:
    """Return the slope of the least-squares line through the logarithms: 0 is flat, 1 is in proportion."""
    sizes = [math.log(size) for size in costs]
    return statistics.linear_regression(sizes, [math.log(cost) for cost in costs.values()]).slope


def last_exponent(costs: Mapping[int, float]) -> float:
    """Return the exponent of the last step alone, where a constant cost hides growth the least."""
    return exponent({size: costs[size] for size in sorted(costs)[-2:]})
