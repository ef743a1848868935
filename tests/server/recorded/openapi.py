"""What an OpenAPI document says of each call, without the names of its schemas, and whether another one still says so."""

from __future__ import annotations

from typing import Any

Description = dict[str, Any]
BOUNDS = (
    "type", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "pattern", "enum",
    "const", "default", "required", "additionalProperties",
)  # fmt: skip


def describe(document: Description) -> Description:
    """By path and method: parameters and fields of the body with their bounds, and the fields of each answer."""
    return {
        f"{method.upper()} {path}": {
            "parameters": {
                f"{item['in']} {item['name']}": {
                    "required": item.get("required", False),
                    **_fields(document, item["schema"]),
                }
                for item in call.get("parameters", [])
            },
            "body": _contents(document, call.get("requestBody", {})),
            "answers": {
                status: {kind: dict.fromkeys(fields, True) for kind, fields in _contents(document, answer).items()}
                for status, answer in call["responses"].items()
            },
        }
        for path, calls in document["paths"].items()
        for method, call in calls.items()
    }


def check_still_described(recorded: object, live: object, place: str = "openapi") -> list[str]:
    """All that was recorded and is not there any more, or is otherwise. What came new is no fault."""
    if isinstance(recorded, dict) and isinstance(live, dict):
        faults = [f"{place}: there is no {key} any more" for key in recorded if key not in live]
        for key in recorded.keys() & live.keys():
            faults += check_still_described(recorded[key], live[key], f"{place}, {key}")
        return sorted(faults)
    return [] if recorded == live else [f"{place}: {live!r}, recorded is {recorded!r}"]


def _contents(document: Description, holder: Description) -> Description:
    return {kind: _fields(document, content.get("schema", {})) for kind, content in holder.get("content", {}).items()}


def _fields(document: Description, schema: Description, place: str = "value") -> Description:
    """Each field at its place, with its bounds."""
    if "$ref" in schema:
        target: Description = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return _fields(document, target | {key: value for key, value in schema.items() if key != "$ref"}, place)
    found = {place: {key: schema[key] for key in BOUNDS if isinstance(schema.get(key), (str, int, float, bool, list))}}
    for name, field in schema.get("properties", {}).items():
        found |= _fields(document, field, f"{place}.{name}")
    if isinstance(schema.get("items"), dict):
        found |= _fields(document, schema["items"], f"{place}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        found |= _fields(document, schema["additionalProperties"], f"{place}.*")
    for kind in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(kind, []):
            for name, bounds in _fields(document, option, place).items():
                known = found.setdefault(name, {})
                if bounds.get("type") == "null":
                    known["null"] = True
                else:
                    found[name] = known | bounds
    return found
