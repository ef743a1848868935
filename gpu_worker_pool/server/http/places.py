"""The route table joined to the handlers: what is at a path, and what answers there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gpu_worker_pool.wire.routes import Resource, Route

from .call import Call, Handler, Handlers
from .response import Response

_PARAMETER = re.compile(r"\{(\w+)\}")


class Polled:
    """The handler of a polled route: its body is there already."""

    def __init__(self, body: Callable[[], bytes]) -> None:
        self.body = body

    async def __call__(self, _: Call) -> Response:
        """Answer with it."""
        return Response(200, self.body())


class Place(NamedTuple):
    """A resource at the path of a call: what answers each method, and the parameters in the path."""

    resource: Resource
    handlers: Mapping[str, Handler]
    parameters: Mapping[str, str]


class PathPattern(NamedTuple):
    """A path with a parameter, which takes what is there, slashes included; it may be empty where it ends the path."""

    before: str
    name: str
    after: str


class Places:
    """All of them. A ValueError where the handlers are not exactly those of the table."""

    def __init__(self, table: Iterable[Resource], handlers: Iterable[Handlers], *, prefix: str) -> None:
        self.polled: dict[str, Callable[[], bytes]] = {}
        self._exact: dict[str, Place] = {}
        self._patterns: list[tuple[PathPattern, Place]] = []
        by_name = _only_once(handlers)
        for resource in table:
            path = f"{prefix}{resource.path}"
            place = Place(resource, {route.method: _take(by_name, route) for route in resource.routes}, {})
            if "{" in path:
                self._patterns.append((PathPattern(*_PARAMETER.split(path)), place))
                continue
            self._exact[path] = place
            if isinstance(handler := place.handlers.get("GET"), Polled):
                self.polled[path] = handler.body
        if by_name:
            raise ValueError(f"these handlers have no route in the table: {', '.join(sorted(by_name))}")

    def find(self, path: str) -> list[Place]:
        """What is at this path; several, where the name of a resource could be a parameter of another one."""
        exact = self._exact.get(path)
        found = [] if exact is None else [exact]
        for pattern, place in self._patterns:
            if path.startswith(pattern.before) and path.endswith(pattern.after):
                value = path[len(pattern.before) : len(path) - len(pattern.after)]
                if value or not pattern.after:
                    found.append(Place(place.resource, place.handlers, {pattern.name: value}))
        return found


def _only_once(handlers: Iterable[Handlers]) -> dict[str, Handler]:
    found: dict[str, Handler] = {}
    for some in handlers:
        if twice := found.keys() & some.keys():
            raise ValueError(f"these routes have two handlers: {', '.join(sorted(twice))}")
        found |= some
    return found


def _take(handlers: dict[str, Handler], route: Route) -> Handler:
    try:
        return handlers.pop(route.name)
    except KeyError:
        raise ValueError(f"the route {route.name} ({route.method}) has no handler") from None
