"""Tool arguments written as raw text, read as the JSON types that the tool's schema declares."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT_IN_DOUBLE = 2**53
_DEEPEST = 100  # levels of unions and references in a schema


def typed_arguments(raw: Mapping[str, str], schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Reads each argument as the type its property declares.

    A property may allow several types (a list of them, anyOf, oneOf, allOf, enum, const, a local $ref); they are tried
    in the order null, integer, number, boolean, object, array, string. If none fits, any valid finite JSON is taken,
    else the raw text. A property that declares no type, or that the schema does not have, stays text.

    Args:
        raw: argument name -> text as the model wrote it.
        schema: the JSON schema of the tool's parameters, or None.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(text, set(_types(properties.get(name), schema, set()))) for name, text in raw.items()}


def to_json(arguments: Mapping[str, Any]) -> str:
    """The arguments as one JSON object, characters beyond ASCII unescaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    # Half of a surrogate pair, possible only through an escape in JSON, cannot be sent as UTF-8.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


def _types(schema: Any, root: Mapping[str, Any], seen: set[int], depth: int = 0) -> Iterator[str]:
    """Names of the JSON types that a property's schema mentions. `seen`: ids of the parts that were looked at."""
    if not isinstance(schema, Mapping) or id(schema) in seen or depth > _DEEPEST:
        return
    seen.add(id(schema))
    declared = schema.get("type")
    yield from (name for name in [declared, *_listed(declared)] if isinstance(name, str))
    for union in ("anyOf", "oneOf", "allOf"):
        for member in _listed(schema.get(union)):
            yield from _types(member, root, seen, depth + 1)
    yield from map(_type_of, _listed(schema.get("enum")))
    if "const" in schema:
        yield _type_of(schema["const"])
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _types(_resolve(reference, root), root, seen, depth + 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that "#/$defs/name" points at; None if there is none."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before int, of which bool is a kind
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _typed(text: str, types: set[str]) -> Any:
    if not types:
        return text
    for name, read in _READERS.items():
        if name in types:
            try:
                return read(text)
            except (ValueError, RecursionError):
                continue
    try:
        return _finite_json(text)
    except (ValueError, RecursionError):
        return text


def _null(text: str) -> None:
    if text.strip().lower() != "null":
        raise ValueError


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError
    return int(text)


def _number(text: str) -> int | float:
    if _INTEGER.fullmatch(text.strip()):
        return int(text)
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError
    value = _finite(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT_IN_DOUBLE else value


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.strip().lower() not in values:
        raise ValueError
    return values[text.strip().lower()]


def _object(text: str) -> dict[str, Any]:
    value = _finite_json(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _array(text: str) -> list[Any]:
    value = _finite_json(text)
    if not isinstance(value, list):
        raise ValueError
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _finite_json(text: str) -> Any:
    """JSON without NaN and infinities, be they written out or as 1e999."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


_READERS: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
    "string": str,
}
