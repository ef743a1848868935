"""The route table with its handlers, indexed by path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_worker_pool.wire.routes import Resource, Route

from .call import Handler, Handlers

_PARAMETER = re.compile(r"\{(\w+)\}")


class RouteMatch(NamedTuple):
    """A resource that matches a path: its handlers by method, and the parameters in the path."""

    resource: Resource
    handlers: Mapping[str, Handler]
    parameters: Mapping[str, str]


class PathPattern(NamedTuple):
    """A path with a parameter. The parameter matches slashes too; at the end of the path it may be empty."""

    before: str
    name: str
    after: str


class RouteIndex:
    """Finds the resources of a path. A ValueError unless the handlers are exactly those of the table."""

    def __init__(self, table: Iterable[Resource], handlers: Iterable[Handlers], *, prefix: str) -> None:
        self._exact: dict[str, RouteMatch] = {}
        # By what a path begins with, up to its second slash below the prefix: few of them are tried for a call.
        self._patterns: dict[str, list[tuple[PathPattern, RouteMatch]]] = {}
        self._prefix = len(prefix)
        by_name = _only_once(handlers)
        without_route = set(by_name)
        for resource in table:
            path = f"{prefix}{resource.path}"
            match = RouteMatch(resource, {route.method: _find(by_name, route) for route in resource.routes}, {})
            without_route.difference_update(route.name for route in resource.routes)
            if "{" in path:
                pattern = PathPattern(*_PARAMETER.split(path))
                self._patterns.setdefault(self._beginning(pattern.before), []).append((pattern, match))
                continue
            self._exact[path] = match
        if without_route:
            raise ValueError(f"these handlers have no route in the table: {', '.join(sorted(without_route))}")

    def _beginning(self, path: str) -> str:
        return path[: path.find("/", self._prefix + 1) + 1]

    def find(self, path: str) -> list[RouteMatch]:
        """The resources at this path; several if one resource's name matches another one's parameter."""
        exact = self._exact.get(path)
        found = [] if exact is None else [exact]
        for pattern, route in self._patterns.get(self._beginning(path), ()):
            if path.startswith(pattern.before) and path.endswith(pattern.after):
                value = path[len(pattern.before) : len(path) - len(pattern.after)]
                if value or not pattern.after:
                    found.append(RouteMatch(route.resource, route.handlers, {pattern.name: value}))
        return found


def _only_once(handlers: Iterable[Handlers]) -> dict[str, Handler]:
    found: dict[str, Handler] = {}
    for some in handlers:
        if twice := found.keys() & some.keys():
            raise ValueError(f"these routes have two handlers: {', '.join(sorted(twice))}")
        found |= some
    return found


def _find(handlers: Mapping[str, Handler], route: Route) -> Handler:
    try:
        return handlers[route.name]
    except KeyError:
        raise ValueError(f"the route {route.name} ({route.method}) has no handler") from None
