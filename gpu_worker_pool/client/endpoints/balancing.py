"""The order in which to try endpoints."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

FIRST_RAMP_SHARE = 0.1
"""The share of its full weight that a just recovered endpoint gets."""


@dataclass(frozen=True, slots=True)
class EndpointView:
    endpoint_id: str
    is_healthy: bool
    total_gpus: int
    available_gpus: int
    recovered_at: float | None = None
    """When it came back after a failure; `None` if it never failed."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """An endpoint's claim to the next request: the highest rank is served, equal ranks share by weight."""

    rank: tuple[float, float]
    weight: float


_NOTHING_TO_GIVE = (0.0, 0.0)
_SOMETHING_TO_GIVE = (1.0, 0.0)
_NO_CEILING = (math.inf, math.inf)


def _by_availability(view: EndpointView) -> _Standing:
    if view.total_gpus <= 0:
        return _Standing(_NOTHING_TO_GIVE, weight=1.0)
    available_percent = 100.0 * view.available_gpus / view.total_gpus
    return _Standing((available_percent, view.available_gpus), weight=1.0)


def _by_turns(_: EndpointView) -> _Standing:
    return _Standing(_SOMETHING_TO_GIVE, weight=1.0)


def _by_capacity(view: EndpointView) -> _Standing:
    if view.total_gpus <= 0:
        return _Standing(_NOTHING_TO_GIVE, weight=1.0)
    return _Standing(_SOMETHING_TO_GIVE, weight=float(view.total_gpus))


_STANDINGS: dict[str, Callable[[EndpointView], _Standing]] = {
    "availability": _by_availability,
    "round_robin": _by_turns,
    "weighted": _by_capacity,
}


class _Rotation:
    """Serves endpoints of equal rank in turn, in proportion to their weights, as smoothly as possible.

    It is nginx's smooth weighted round robin. With each request every candidate earns credit by its weight; the one
    with the most is served and pays for it. So an endpoint gets its fair share of the requests during which it was a
    candidate, and never more than a few in a row. Credit is counted in requests, not in weights, so it keeps its worth
    when endpoints come and go.
    """

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}

    def next_order(self, standings: Mapping[str, _Standing], known_ids: Iterable[str]) -> list[str]:
        """Return the ids in `standings`, best first and ties in the given order; the first is charged one request.

        The credit of `known_ids` is kept, even if some are not candidates now. Other ids are forgotten.
        """
        self._credits = {endpoint_id: self._credits.get(endpoint_id, 0.0) for endpoint_id in known_ids}
        if not standings:
            return []
        best_rank = max(standing.rank for standing in standings.values())
        sharing = {
            endpoint_id: standing.weight for endpoint_id, standing in standings.items() if standing.rank == best_rank
        }
        total_weight = sum(sharing.values())
        for endpoint_id, weight in sharing.items():
            self._credits[endpoint_id] += weight / total_weight
        # Rounded, so that noise in the last digits does not decide between equals.
        order = sorted(
            standings,
            key=lambda endpoint_id: (standings[endpoint_id].rank, round(self._credits[endpoint_id], 9)),
            reverse=True,
        )
        self._credits[order[0]] -= 1.0
        return order

    def __repr__(self) -> str:
        return ", ".join(f"{endpoint_id} {credit:+.2f}" for endpoint_id, credit in self._credits.items())


class Balancer:
    """Orders endpoints by one of the strategies above; for any other name a ValueError lists them.

    An endpoint that recovered less than `ramp_s` ago gets a share of its weight that grows linearly from
    `FIRST_RAMP_SHARE` to all of it. Until then its rank counts as no better than the best of the others.
    """

    def __init__(self, name: str, ramp_s: float = 30.0) -> None:
        if name not in _STANDINGS:
            raise ValueError(f"load balancing strategy must be one of {', '.join(_STANDINGS)}, not {name!r}")
        if not 0.0 <= ramp_s < math.inf:
            raise ValueError(f"ramp_s must be a finite number of 0 or more seconds, not {ramp_s!r}")
        self.name = name
        self._standing_of = _STANDINGS[name]
        self._ramp_s = ramp_s
        self._rotation = _Rotation()

    def order(self, views: Iterable[EndpointView], now: float) -> list[str]:
        """Return the ids of all healthy endpoints, the one to try first at the front; each call is one request.

        `views` are all endpoints, healthy or not, each once and in any order.
        """
        views = sorted(views, key=lambda view: view.endpoint_id)
        healthy = [view for view in views if view.is_healthy]
        standings = {view.endpoint_id: self._standing_of(view) for view in healthy}
        shares = {view.endpoint_id: self._ramp_share(view, now) for view in healthy}
        # Limited to the best rank of the settled ones, a recovering endpoint shares with them by its small weight
        # instead of taking every request. Endpoints with no GPUs to give set no limit.
        settled_ranks = (standings[endpoint_id].rank for endpoint_id, share in shares.items() if share == 1.0)
        ceiling = max((rank for rank in settled_ranks if rank > _NOTHING_TO_GIVE), default=_NO_CEILING)
        ramped = {
            endpoint_id: _Standing(min(standing.rank, ceiling), standing.weight * shares[endpoint_id])
            for endpoint_id, standing in standings.items()
        }
        return self._rotation.next_order(ramped, [view.endpoint_id for view in views])

    def _ramp_share(self, view: EndpointView, now: float) -> float:
        if view.recovered_at is None or self._ramp_s == 0.0:
            return 1.0
        progress = max(0.0, (now - view.recovered_at) / self._ramp_s)
        return min(1.0, FIRST_RAMP_SHARE + (1.0 - FIRST_RAMP_SHARE) * progress)

    def __repr__(self) -> str:
        return f"<Balancer {self.name}: {self._rotation!r}>"
