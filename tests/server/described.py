"""Hold an answer against what describes it: a type of the wire, or a schema of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

Schema = Mapping[str, Any]


def assert_described(kind: Any, answer: Any) -> None:
    """Each key of the answer is in the type, and each key of the type in the answer."""
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    for each in (schema, *schema.get("$defs", {}).values()):
        each["required"] = list(each.get("properties", ()))
    assert list(undescribed(schema, answer, schema.get("$defs", {}))) == []


def undescribed(schema: Schema, answer: Any, schemas: Mapping[str, Schema], place: str = "$") -> Iterator[str]:
    """What stands in the answer and not in the schema, or the other way round. Where it could be one of several schemas,
    the one that it fits best counts.
    """
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if options := schema.get("anyOf"):
        yield from min((list(undescribed(option, answer, schemas, place)) for option in options), key=len)
        return
    kinds: dict[str, type | tuple[type, ...]] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    }  # fmt: skip
    kind = schema.get("type")
    if kind is not None and not isinstance(answer, kinds[kind]):
        yield f"{place} is not of type {kind}"
    elif isinstance(answer, list):
        for number, item in enumerate(answer):
            yield from undescribed(schema["items"], item, schemas, f"{place}[{number}]")
    elif isinstance(answer, dict):
        known, free = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in answer)
        for name, value in answer.items():
            described = known.get(name, free)
            if not isinstance(described, Mapping):
                yield f"{place}.{name} is not described"
            else:
                yield from undescribed(described, value, schemas, f"{place}.{name}")
    elif "enum" in schema and answer not in schema["enum"]:
        yield f"{place} is {answer!r}, which is not described"
