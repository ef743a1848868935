"""The order in which to try endpoints."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# An endpoint's claim to the next request: the highest rank is served, equal ranks share by weight.
Claim = tuple[tuple[float, float], float]


@dataclass(frozen=True, slots=True)
class EndpointView:
    endpoint_id: str
    is_healthy: bool
    total_gpus: int
    available_gpus: int


def _by_availability(view: EndpointView) -> Claim:
    share = view.available_gpus / view.total_gpus if view.total_gpus > 0 else 0.0
    return (share, view.available_gpus if share else 0.0), 1.0


def _by_turns(_: EndpointView) -> Claim:
    return (1.0, 0.0), 1.0


def _by_capacity(view: EndpointView) -> Claim:
    return ((1.0, 0.0), view.total_gpus) if view.total_gpus > 0 else ((0.0, 0.0), 1.0)


_CLAIMS: dict[str, Callable[[EndpointView], Claim]] = {
    "availability": _by_availability,
    "round_robin": _by_turns,
    "weighted": _by_capacity,
}


class Balancer:
    """Orders endpoints by one of the strategies above; for any other name a ValueError lists them.

    Endpoints of equal rank are served in turn, in proportion to their weights, by nginx's smooth weighted round robin.
    With each request every candidate earns credit by its weight; the one with the most is served and pays for it. So an
    endpoint gets its fair share of the requests during which it was a candidate, and never more than a few in a row.
    Credit is counted in requests, not in weights, so it keeps its worth when endpoints come and go.
    """

    def __init__(self, name: str) -> None:
        if name not in _CLAIMS:
            raise ValueError(f"load balancing strategy must be one of {', '.join(_CLAIMS)}, not {name!r}")
        self.name = name
        self._credits: dict[str, float] = {}

    def __repr__(self) -> str:
        owed = ", ".join(f"{endpoint_id} {credit:+.2f}" for endpoint_id, credit in self._credits.items())
        return f"<Balancer {self.name}: {owed}>"

    def order(self, views: Iterable[EndpointView]) -> list[str]:
        """Return the ids of all healthy endpoints, the one to try first at the front; each call is one request.

        `views` are all endpoints, healthy or not, each once and in any order.
        """
        views = sorted(views, key=lambda view: view.endpoint_id)
        # Those that are away keep their credit; those that are no longer known lose it.
        self._credits = {view.endpoint_id: self._credits.get(view.endpoint_id, 0.0) for view in views}
        claims = {view.endpoint_id: _CLAIMS[self.name](view) for view in views if view.is_healthy}
        if not claims:
            return []
        best_rank = max(rank for rank, _ in claims.values())
        sharing = {endpoint_id: weight for endpoint_id, (rank, weight) in claims.items() if rank == best_rank}
        for endpoint_id, weight in sharing.items():
            self._credits[endpoint_id] += weight / sum(sharing.values())
        # Rounded, so that noise in the last digits does not decide between equals.
        order = sorted(claims, key=lambda id_: (claims[id_][0], round(self._credits[id_], 9)), reverse=True)
        self._credits[order[0]] -= 1.0
        return order
