"""The route table: every call of the server. The router, the home page and the OpenAPI document are made from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from . import pool
from .bounds import (
    DEFAULT_HOURS,
    FEWEST_HOURS,
    FEWEST_PACE_S,
    MAX_QUEUE,
    MAX_REASON,
    MAX_WAIT_S,
    MOST_HOURS,
    MOST_PACE_S,
    Range,
)

Method = Literal["GET", "PUT", "POST", "DELETE"]
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
PAGE_HOURS = ("1", "6", "24", "168")
PAGE_WEEKS = ("4", "12")
# The refusals of every writing call, before it is carried out.
WRITING = (400, 401, 403, 408, 413, 415, 422, 429, 503)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the query. `unit` is what a number counts; `choices` are the only valid texts, and `longest` is the
    number of characters of a free text.
    """

    name: str
    note: str
    default: float | str | None = None
    range: Range | None = None
    unit: str | None = None
    is_whole: bool = False
    choices: tuple[str, ...] = ()
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One method of a resource. `answer` is the type of its JSON body, or None.

    `caller` says who may make the call: `anyone`, a `writer` (on the server's machine, or with a token) or an `admin`.
    """

    method: Method
    name: str
    summary: str
    answer: Any
    problems: tuple[int, ...] = ()
    form: type | None = None
    query: tuple[Parameter, ...] = ()
    caller: Literal["anyone", "writer", "admin"] = "anyone"
    statuses: tuple[tuple[int, str], ...] = ((200, "Successful Response"),)
    media_type: str = JSON
    is_form_optional: bool = False


@dataclass(frozen=True, slots=True)
class Resource:
    """A path and its methods. `help` is its text on the home page; None if it is not listed.

    A parameter in the path matches everything up to the text that follows it, slashes included. `tag` groups the calls
    in the document; calls of the page have its headers. `cors` says when a page of any origin may read the answer to a
    GET: `always`, or only if the browser `asks`; the page's own data `never`.

    `answered_by` says who answers in a fleet: the `box` that is asked, by what it knows itself; the `leader`, to whom the
    box passes the call on; or the `custodian`, the box that keeps the lease. Calls that the leader answers exist twice:
    they mean the box that was asked, and with `is_fleet` the whole fleet.
    """

    path: str
    help: str | None
    routes: tuple[Route, ...]
    tag: Literal["", "leases", "admin", "page"] = ""
    cors: Literal["always", "asks", "never"] = "always"
    answered_by: Literal["box", "leader", "custodian"] = "box"
    is_fleet: bool = False


WAIT_S = Parameter(
    "wait_s", "How long to hold the answer back while the request is queued.", 0.0, Range(0, MAX_WAIT_S), "seconds"
)
DEVICES = Parameter("devices", "How `env` names the GPUs.", "index", choices=("index", "uuid"))
HOLDER = Parameter(
    "as",
    "`holder`: the lease's own holder releases it; its process may go on and leave a context.",
    choices=("holder",),
)
REASON = Parameter("reason", "Why, in words. The holder, the log and the events show it.", longest=MAX_REASON)
QUEUE = Parameter("queue", "Show at most so many waiters.", None, Range(0, MAX_QUEUE), is_whole=True)
LEASES = Parameter(
    "leases", "Show at most so many leases that are not queued.", None, Range(0, MAX_QUEUE), is_whole=True
)
SINCE = Parameter(
    "since",
    "Start of the span: ISO 8601 (UTC unless it says otherwise) or seconds since 1970. Default: a day before its end.",
)
UNTIL = Parameter("until", "End of the span, likewise. Default: now.")
HOURS = Parameter("hours", "How far back from now.", DEFAULT_HOURS, Range(FEWEST_HOURS, MOST_HOURS), "hours")
HOURS_OF_PAGE = Parameter("hours", "How far back from now.", "6", choices=PAGE_HOURS)
WEEKS_OF_PAGE = Parameter("weeks", "How many weeks, with this one.", PAGE_WEEKS[0], choices=PAGE_WEEKS)
NODE_OF_GPU = Parameter("node", "The node of the GPU.", longest=MAX_REASON)
UUID_OF_GPU = Parameter("uuid", "The UUID of the GPU.", longest=MAX_REASON)
PACE_S = Parameter(
    "pace_s",
    "Send only the event `changed`, at most once in so many seconds.",
    None,
    Range(FEWEST_PACE_S, MOST_PACE_S),
    "seconds",
)

ASKED = ((200, "The lease exists already"), (201, "Granted"), (202, "Queued, after up to wait_s"))
ANY_GPU = pool.PoolGpu | pool.MissingGpu


def _get(name: str, summary: str, answer: Any, problems: tuple[int, ...] = (), **options: Any) -> Route:
    return Route("GET", name, summary, answer, problems, **options)


def _write(method: Method, name: str, summary: str, answer: Any, *problems: int, **options: Any) -> Route:
    return Route(method, name, summary, answer, (*WRITING, *problems), **{"caller": "writer", **options})


def _admin(method: Method, name: str, summary: str, answer: Any, *problems: int, **options: Any) -> Route:
    return _write(method, name, summary, answer, *problems, caller="admin", **options)


def _statistics(path: str, help_text: str, *routes: Route) -> Resource:
    return Resource(path, help_text, routes, cors="asks")


def _leases(path: str, help_text: str | None, *routes: Route) -> Resource:
    return Resource(path, help_text, routes, tag="leases", answered_by="leader")


def _operator(path: str, help_text: str | None, *routes: Route) -> Resource:
    return Resource(path, help_text, routes, tag="admin", answered_by="leader")


def _for_page(path: str, help_text: str | None, *routes: Route) -> Resource:
    return Resource(path, help_text, routes, tag="page", cors="never")


def _page_data(path: str, *routes: Route) -> Resource:
    return replace(_for_page(path, None, *routes), answered_by="leader")


TABLE: tuple[Resource, ...] = ()

FLEET_PREFIX = "/fleet"
RENEW_AT_BOX = f"{FLEET_PREFIX}/custody/renew"


def _for_fleet(resource: Resource) -> Resource:
    """The same calls, for the whole fleet."""
    return replace(resource, path=f"{FLEET_PREFIX}{resource.path}", help=None, is_fleet=True)


# What there is in a fleet only. The calls that mean the whole fleet are those of the table above.
FLEET_TABLE: tuple[Resource, ...] = (*(_for_fleet(resource) for resource in TABLE if resource.answered_by != "box"),)
