"""Makes the OpenAPI document from the route table with FastAPI. Loaded on the first call, because few servers get one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fastapi import Body, Path, Query, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, create_model
from starlette.routing import BaseRoute

from gpu_worker_pool.core.model.gpu_names import GPU_NAME, MAX_NAME, MAX_NAMES
from gpu_worker_pool.wire.bounds import LEASE_ID, MAX_IDS, MAX_LABELS, PRINTABLE, Note, Printable, Range
from gpu_worker_pool.wire.events import EVENTS
from gpu_worker_pool.wire.leases import ObstacleView, VerdictView
from gpu_worker_pool.wire.routes import JSON, Parameter, Resource, Route
from gpu_worker_pool.wire.service import Problem

from .pool_route import PoolRoute

PROBLEM_JSON = "application/problem+json"
REF = "#/components/schemas/{model}"
TAGS = {"": [], "leases": ["leases"], "admin": ["leases", "admin"], "page": ["page"]}
# Types of which not all keys are always sent; these always are.
_ALWAYS = {VerdictView: {"code", "text"}, ObstacleView: {"code", "text", "node", "gpu_id", "uuid"}}

_LEASE_ID_SCHEMA = {"type": "string", "pattern": LEASE_ID}
_GPU_NAME_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_NAME, "pattern": f"^(?:{GPU_NAME})$"},
        {"type": "integer", "minimum": 0},
    ]
}
# Fields whose bounds are not a range.
_SPECIAL: dict[str, Any] = {
    "among": WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "minItems": 1, "maxItems": MAX_NAMES, "items": _GPU_NAME_SCHEMA},
                {"type": "null"},
            ]
        }
    ),
    "ids": WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_IDS, "items": _LEASE_ID_SCHEMA}),
    "warned": WithJsonSchema({"type": "array", "maxItems": MAX_IDS, "items": _LEASE_ID_SCHEMA}),
    "labels": Field(max_length=MAX_LABELS),
}


def make_document(
    table: Iterable[Resource], new: Iterable[BaseRoute], *, prefix: str, title: str, version: str, description: str
) -> dict[str, Any]:
    routes = [route.documented() for route in new if isinstance(route, PoolRoute) and route.include_in_schema]
    routes += list(_routes(table, prefix))
    document = get_openapi(title=title, version=version, description=description, routes=routes)
    problem, of_fastapi = ({"$ref": REF.format(model=name)} for name in (Problem.__name__, "HTTPValidationError"))
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path in document["paths"].values():
        for call in path.values():
            for status, answer in list(call["responses"].items()):
                content = answer.get("content", {})
                schema = content.get(JSON, {}).get("schema")
                if schema == problem:
                    content[PROBLEM_JSON] = content.pop(JSON)
                elif schema == of_fastapi:
                    del call["responses"][status]  # FastAPI's own, which this server never sends
    schemas = document["components"]["schemas"]
    schemas[Problem.__name__] = TypeAdapter(Problem).json_schema(mode="serialization")
    for kind, always in _ALWAYS.items():
        if kind.__name__ in schemas:
            schemas[kind.__name__]["required"] = sorted(always)
    told = document["paths"][f"{prefix}/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    told["x-events"] = {name: _schema(kind, document["components"]["schemas"]) for name, kind in EVENTS.items()}
    return document


def _routes(table: Iterable[Resource], prefix: str) -> Iterator[APIRoute]:
    for resource in table:
        for route in resource.routes:
            yield APIRoute(
                f"{prefix}{resource.path}",
                _endpoint(resource.path, route),
                methods=[route.method],
                name=f"fleet_{route.name}" if resource.is_fleet else route.name,
                summary=route.summary,
                tags=list(TAGS[resource.tag]),
                response_model=None if route.answer is None else model_type(route.answer),
                response_class=Response if route.answer is None else JSONResponse,
                responses=_responses(route),
            )


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {}
    for status, text in route.statuses:
        found[status] = {"description": text}
        if route.answer is None:
            found[status]["content"] = {route.media_type: {}}
        elif status < 300:
            found[status]["model"] = model_type(route.answer)
    return found | {status: {"model": _model(Problem)} for status in route.problems}


def _endpoint(path: str, route: Route) -> Any:
    """A function with the call's parameters, for FastAPI to describe; it is never called."""

    async def endpoint(**_: Any) -> None: ...

    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [keyword(name, annotation=Annotated[str, _path(name)]) for name in names]
    # A name in the query may be a keyword of Python.
    parameters += [keyword(f"{item.name}_", default=item.default, annotation=_query_type(item)) for item in route.query]
    if route.form is not None:
        model: Any = _model(route.form)
        default = None if route.is_form_optional else inspect.Parameter.empty
        wanted = model | None if route.is_form_optional else model
        annotation: Any = Annotated.__class_getitem__((wanted, Body()))  # type: ignore[attr-defined]
        parameters.append(keyword("form", default=default, annotation=annotation))
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return endpoint


def _path(name: str) -> Any:
    return Path(json_schema_extra={"pattern": LEASE_ID}) if name == "lease_id" else Path()


def _query_type(parameter: Parameter) -> Any:
    bare: Any = int if parameter.is_whole else float if parameter.range else str
    pattern = f"^({'|'.join(parameter.choices)})$" if parameter.choices else PRINTABLE if parameter.longest else None
    low, high = (parameter.range.low, parameter.range.high) if parameter.range else (None, None)
    longest = parameter.longest
    query = Query(
        alias=parameter.name, description=parameter.note, ge=low, le=high, pattern=pattern, max_length=longest
    )
    return Annotated[bare | None if parameter.default is None else bare, query]


def model_type(kind: Any) -> Any:
    """The type with a pydantic model in place of each dataclass in it."""
    if is_dataclass(kind):
        hashable: Any = kind
        return _model(hashable)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return list[model_type(inner[0])]  # type: ignore[misc]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, model_type(inner[1])]  # type: ignore[misc]
    if any(is_dataclass(item) for item in inner):
        found = model_type(inner[0])
        for item in inner[1:]:
            found |= model_type(item)
        return found
    return kind


@lru_cache(maxsize=128)
def _model(kind: Any) -> type[BaseModel]:
    hints = get_type_hints(kind, include_extras=True)
    is_form = kind.__name__.endswith("Form")
    always = _ALWAYS.get(kind)
    found: dict[str, Any] = {}
    for item in fields(kind):
        annotation = _field_type(item.name, hints[item.name]) if is_form else model_type(hints[item.name])
        is_required = item.name in always if always else not is_form or item.default is item.default_factory is MISSING
        default = ... if is_required else None if item.default is MISSING else item.default
        found[item.name] = (annotation, Field(default_factory=dict) if item.name == "labels" and is_form else default)
    config = ConfigDict(extra="forbid") if is_form else ConfigDict()
    return create_model(kind.__name__, __config__=config, __doc__=kind.__doc__, **found)


def _field_type(name: str, hint: Any) -> Any:
    bounds = getattr(hint, "__metadata__", ())
    bare = hint.__origin__ if bounds else hint
    described: dict[str, Any] = {}
    for bound in bounds:
        match bound:
            case Range():
                described |= {"ge": bound.low, "le": bound.high}
            case Printable():
                described |= {"max_length": bound.longest, "pattern": PRINTABLE}
            case Note():
                described["description"] = bound.text
    special = (_SPECIAL[name],) if name in _SPECIAL else ()
    return Annotated[(bare, Field(**described), *special)]


def _schema(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(model_type(kind)).json_schema(ref_template=REF, mode="serialization")
    for name, part in schema.pop("$defs", {}).items():
        components.setdefault(name, part)
    return schema
