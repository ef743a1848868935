"""Reads what callers send, by the types of forms and parameters, and says what is wrong in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from .response import Refusal

MOST_FAULTS = 5
# How pydantic begins and ends to say what a value must be.
_SUBJECT = re.compile("^(Input|String|Tuple|Dictionary|Value) should")
_TAIL = re.compile("( after validation)?, (not|unable) .*$")
# Its words for what Python calls otherwise than JSON.
_KINDS = {"a valid string": "a text", "a valid tuple": "a list", "a valid dictionary": "an object"}
MOST_PARAMETERS = 20
FormT = TypeVar("FormT")


@lru_cache(maxsize=256)
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """The reader of a type; several routes have the same. To find that of an annotated type takes long: a route keeps it."""
    return TypeAdapter(kind)


def read_form(kind: type[FormT], body: bytes) -> FormT:
    """Read a form; an empty body counts as `{}`. A Refusal has a sentence for each of the first faults: 400 if the body cannot
    be read, 422 if a value is invalid.
    """
    data, adapter = _read_object(body) if body else {}, adapter_of(kind)  # type: ignore[arg-type]  # a class is hashable
    try:
        form: FormT = adapter.validate_python(data)
    except ValidationError as error:
        fields: dict[str, Any] = adapter.json_schema()["properties"]
        found = error.errors(include_url=False)
        unknown = [_unknown_field(fields, _name(one)) for one in found if _name(one) not in fields]
        invalid = [_fault(one, fields[_name(one)]) for one in found if _name(one) in fields]
        raise Refusal(422, _sentences([*unknown, *invalid])) from None
    return form


def read_query(raw: str, known: Mapping[str, TypeAdapter[Any]], *, ignores_unknown: bool = False) -> dict[str, Any]:
    """The parameters of a query by their types. A Refusal if one is invalid, unknown or given twice; with `ignores_unknown`,
    the first of each name counts.
    """
    if not raw:
        return {}
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, max_num_fields=None if ignores_unknown else MOST_PARAMETERS)
    except ValueError:
        raise Refusal(422, f"The query has too many parameters; there must be at most {MOST_PARAMETERS}.") from None
    found: dict[str, Any] = {}
    for name, text in pairs:
        if ignores_unknown and (name not in known or name in found):
            continue
        if name not in known:
            allowed = f"it must be {one_of(tuple(known))}" if known else "this call takes none"
            raise Refusal(422, f"The query has an unknown parameter {name[:40]!r}; {allowed}.")
        if name in found:
            raise Refusal(422, f"The query's parameter {name} is given twice; send it once.")
        found[name] = read_text(name, known[name], text)
    return found


def read_text(name: str, adapter: TypeAdapter[Any], text: str) -> Any:
    """The value of a parameter of the query or the path. A Refusal names the parameter, the text and what it must be."""
    try:
        return adapter.validate_python(text)
    except ValidationError as error:
        fault = {**error.errors(include_url=False)[0], "loc": (name,)}
        raise Refusal(422, _sentences([_fault(fault, adapter.json_schema())])) from None


def one_of(choices: Iterable[str]) -> str:
    found = tuple(choices)
    return " or ".join(found) if len(found) <= 2 else f"one of {', '.join(found)}"


def show(value: object) -> str:
    """Quote a value briefly, in ASCII, and without its parts: it may be large or deep."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else f"{value[:40]}...")
    is_long = isinstance(value, int) and value.bit_length() > 128  # Python refuses to write one of thousands of digits
    return json.dumps(float("inf") if is_long else value)


def _name(fault: ErrorDetails) -> str:
    """The field that a fault is of. A name that is not even a text has no place, but is the input itself."""
    return str(fault["loc"][0] if fault["loc"] else fault["input"])


def _fault(fault: Any, schema: Mapping[str, Any]) -> str:
    """One fault in words: the field, the value, and what it must be, by the schema of the field and as pydantic says it."""
    # The key of a mapping is not a place in it.
    place, kind = fault["loc"][:1] if "[key]" in fault["loc"] else fault["loc"], fault["type"]
    name = ".".join(map(str, place))
    if kind == "missing":
        return f"{name} is missing; send it"
    if kind == "value_error":
        return f"{name}: {fault['ctx']['error']}"
    must = _TAIL.sub("", _SUBJECT.sub("it must", fault["msg"]))
    for python, plain in _KINDS.items():
        must = must.replace(python, plain)
    bounds = next((one for one in schema.get("anyOf", ()) if "maximum" in one), schema)
    if "maximum" in bounds:
        number = "a whole number" if bounds["type"] == "integer" else "a number"
        must = f"it must be {number} from {bounds['minimum']:.15g} to {bounds['maximum']:.15g}"
    return f"{name}: {show(fault['input'])} cannot be used; {must}"


def _unknown_field(known: Iterable[str], name: str) -> str:
    # Comparing long texts is slow.
    close = get_close_matches(name, known, n=2) if len(name) <= 64 else []
    hint = f"did you mean {' or '.join(close)}?" if close else f"it must be one of {', '.join(known)}"
    return f"{show(name).strip(chr(34))}: there is no such field; {hint}"


def _sentences(faults: list[str]) -> str:
    sentences = [fault if fault[-1] in ".?" else f"{fault}." for fault in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        sentences.append("And more.")
    return " ".join(sentences)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, _ in pairs:
            if found.pop(name, pairs) is pairs:  # removed already, so it is repeated
                raise Refusal(422, f"{show(name)} is given twice; send each field once.")
    return found


def _whole(digits: str) -> int | float:
    # Beyond every range here, and Python refuses to convert thousands of digits: a float will do, even an infinite one.
    return int(digits) if len(digits) <= 30 else float(digits)


# Python's decoder passes on every pair, so that a repeated name is found. It takes NaN and Infinity; no field does, so the
# fault names the field.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        data = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Refusal(400, f"The body is not UTF-8, from byte {error.start + 1} on; send JSON in UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refusal(400, f"The body is not JSON ({where}): {error.msg}.") from None
    except RecursionError:
        raise Refusal(422, "The body is nested too deeply; send one object of plain fields.") from None
    if not isinstance(data, dict):
        raise Refusal(422, f"The body is {show(data)}; send an object of fields.")
    return data
