"""A histogram that costs little to add to: the library's takes several calls and a lock for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from time import time

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class PlainHistogram:
    """`buckets` are the upper bounds, in order. Only one thread may add to it."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._began_at = time()

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._began_at)
        return family
