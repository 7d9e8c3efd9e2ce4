"""Raw argument text becomes the JSON type that the tool's schema declares."""

import json

import pytest

from serve.text.tool_arguments import to_json, typed_arguments

BIG = "9" * 5000


def read(text, property_schema, **definitions):
    schema = {"type": "object", "properties": {"x": property_schema}, **definitions}
    return typed_arguments({"x": text}, schema)["x"]


@pytest.mark.parametrize("text", ["4211", "00077", "true", "null", "[1]", '"quoted"', " x "])
def test_pa04_a_string_stays_a_string(text):
    assert read(text, {"type": "string"}) == text
    assert read(text, {}) == text
    assert typed_arguments({"y": text}, {"properties": {}}) == {"y": text}
    assert typed_arguments({"y": text}, None) == {"y": text}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("integer", "4211", 4211),
        ("integer", " -3\n", -3),
        ("integer", "00077", 77),
        ("integer", "abc", "abc"),
        ("integer", "3.5", 3.5),
        ("integer", "1_000", "1_000"),
        ("integer", "٣", "٣"),
        ("integer", BIG, BIG),
        ("number", "2.0", 2),
        ("number", "2.5e-3", 0.0025),
        ("number", ".5", 0.5),
        ("number", "12345678901234567890", 12345678901234567890),
        ("number", "1e300", 1e300),
        ("number", "1e999", "1e999"),
        ("number", "nan", "nan"),
        ("number", "Infinity", "Infinity"),
        ("boolean", "True", True),
        ("boolean", "0", False),
        ("boolean", "yes", "yes"),
        ("null", "NULL", None),
        ("null", "nil", "nil"),
        ("object", '{"a": {"b": 2}}', {"a": {"b": 2}}),
        ("object", "[1]", [1]),
        ("object", "{bad}", "{bad}"),
        ("object", '{"a": 1e999}', '{"a": 1e999}'),
        ("object", '{"a": NaN}', '{"a": NaN}'),
        ("array", "[1, [2]]", [1, [2]]),
        ("array", "[" * 100_000, "[" * 100_000),
    ],
)
def test_pa04_declared_types(kind, text, expected):
    value = read(text, {"type": kind})
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"oneOf": [{"allOf": [{"type": "null"}]}, {"type": "integer"}]},
        {"enum": [None, 3]},
        {"anyOf": [{"const": 3}, {"enum": [None]}]},
        {"$ref": "#/$defs/Count"},
    ],
)
def test_unions(schema):
    definitions = {"$defs": {"Count": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"$ref": "#/$defs/Count"}]}}}
    assert read("3", schema, **definitions) == 3
    assert read("null", schema, **definitions) is None


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        (["string", "integer"], "7", 7),
        (["string", "integer"], "7up", "7up"),
        (["boolean", "integer"], "1", 1),
        (["string", "null"], "null", None),
        (["number", "boolean"], "true", True),
        (["string", "object"], '{"a": 1}', {"a": 1}),
    ],
)
def test_types_are_tried_in_a_fixed_order(types, text, expected):
    value = read(text, {"type": types})
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "schema", [True, None, "string", {"type": None}, {"type": 3}, {"enum": 3}, {"anyOf": {}}, {"$ref": "#/no/where"}]
)
def test_schemas_that_say_nothing_leave_text(schema):
    assert read("7", schema) == "7"
    assert typed_arguments({"x": "7"}, {"properties": schema}) == {"x": "7"}


def test_json_text():
    assert to_json({"a": "한", "b": [1, None]}) == '{"a": "한", "b": [1, null]}'
    half = to_json({"a": read('{"k": "\\ud800"}', {"type": "object"})})
    assert half == '{"a": {"k": "\\ud800"}}'
    assert json.loads(half.encode()) == {"a": {"k": "\ud800"}}


def test_references_that_double_at_every_level_end():
    levels = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]} for i in range(30)}
    assert read("7", {"$ref": "#/$defs/0"}, **{"$defs": levels | {"30": {"type": "integer"}}}) == 7


def test_unions_nested_too_deep_declare_nothing():
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert read("7", schema) == "7"
