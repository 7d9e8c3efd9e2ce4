"""Inkling's chat format, token for token as its makers' renderer writes it, by template and without."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import InvalidRequest
from serve.text import encode_chat, load_tokenizer, render_chat
from serve.text.chat_template import BUILT_IN
from serve.text.inkling_prompt import EFFORTS, effort_text
from serve.text.inkling_tokens import PLACEHOLDERS, control_names

GOLDEN = json.loads((Path(__file__).parent / "inkling_golden.json").read_text("utf-8"))
TEMPLATE = (Path(__file__).parents[3] / "checkpoints/training/inkling/chat_template.jinja").read_text("utf-8")
BOTH = pytest.mark.parametrize("template", [BUILT_IN, TEMPLATE], ids=["built-in", "template"])
USER = {"role": "user", "content": "Hi"}
EFFORT = [200002, 200004, 133850, 6942, 3211, 25, 220, 15, 13, 24, 200010]
MODEL = 200001
EFFORT_TEXT = "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
USER_TEXT = "<|message_user|><|content_text|>Hi<|end_message|>"


@BOTH
@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_prompts_are_those_of_the_makers_renderer(inkling, template, case):
    options = {"template": template, "reasoning_effort": case["effort"], "add_generation_prompt": False}
    assert encode_chat(inkling, case["messages"], case.get("tools"), **options) == case["ids"]


SPEC_SYSTEM = [200002, 200004, 3238, 7403, 13, 200010]
SPEC_TOOLS = """200002 17952 5047 44660 200024 58 10848 9186 7534 67 4294 897 7534 522 170154 4294 24021 70649 35913
 70649 17500 70649 2493 7534 1655 57612 3532 2493 7534 3369 18583 3532 2493 7534 2706 18583 60 200010"""
SPEC_REST = """200000 200004 29602 30 200010 200001 200008 40 1757 2421 200010 200001 200004 77836 13 200010
 200001 522 170154 200049 10848 897 7534 522 170154 4294 4285 70649 64 1243 16 3532 17500 7534 46661 57612 200010 200006
 200003 522 170154 200004 145166 200010"""


@BOTH
def test_worked_example_of_a_plain_question(inkling, template):
    ids = encode_chat(inkling, [USER], template=template, add_generation_prompt=False)
    assert ids == [*EFFORT, 200000, 200004, 12194, 200010]
    assert encode_chat(inkling, [USER], template=template) == [*ids, MODEL]


@BOTH
def test_worked_example_of_a_tool_call(inkling, template):
    """Every id of spec 8.5, on both forms of the vocabulary: see also the golden cases."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "description": "d", "parameters": parameters}
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "SF", "a": 1}}}
    messages = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "I should call", "content": "Calling.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    ]
    ids = encode_chat(inkling, messages, [{"type": "function", "function": function}], template=template)
    assert ids == [*SPEC_SYSTEM, *map(int, SPEC_TOOLS.split()), *EFFORT, *map(int, SPEC_REST.split()), MODEL]


@pytest.mark.parametrize(
    ("effort", "digits"),
    [(0, [15]), (0.1, [15, 13, 16]), (0.2, [15, 13, 17]), (0.7, [15, 13, 22]), (0.99, [15, 13, 2058])],
)
@BOTH
def test_worked_examples_of_efforts(inkling, template, effort, digits):
    ids = encode_chat(inkling, [USER], template=template, reasoning_effort=effort)
    assert ids[: ids.index(200010)] == [200002, 200004, 133850, 6942, 3211, 25, 220, *digits]


@pytest.mark.parametrize(
    ("effort", "written"),
    [
        ("none", "0"),
        ("minimal", "0.1"),
        ("low", "0.2"),
        ("medium", "0.7"),
        ("high", "0.9"),
        ("xhigh", "0.99"),
        ("max", "0.99"),
        (None, "0.9"),
        (0.35, "0.35"),
        ("0.35", "0.35"),
        ("0.0", "0"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (0.05, "0.05"),
        (0.905, "0.9"),
        (0.345, "0.34"),
        (0.355, "0.36"),
        (0.015, "0.02"),
        (0.005, "0"),
    ],
)
@BOTH
def test_tk01_efforts_by_name_and_number(inkling, template, effort, written):
    text = (
        f"<|message_system|><|content_text|>Thinking effort level: {written}<|end_message|>{USER_TEXT}<|message_model|>"
    )
    assert render_chat(inkling, [USER], template=template, reasoning_effort=effort) == text
    assert render_chat(inkling, [USER], template=template, template_kwargs={"reasoning_effort": effort}) == text


@pytest.mark.parametrize(
    "effort", ["ultra", "High", "", "1", "0.999", ".5", 1, 1.0, 0.991, -0.1, True, float("nan"), [0.5]]
)
@pytest.mark.parametrize("template", [BUILT_IN, "{{ reasoning_effort }}"], ids=["built-in", "lax template"])
def test_tk01_an_unknown_effort_is_refused(inkling, template, effort):
    with pytest.raises(InvalidRequest, match="reasoning_effort"):
        encode_chat(inkling, [USER], template=template, reasoning_effort=effort)
    with pytest.raises(InvalidRequest, match="reasoning_effort"):
        encode_chat(inkling, [USER], template=template, template_kwargs={"reasoning_effort": effort})


@BOTH
def test_tk01_thinking_switched_off_is_an_effort_of_none(inkling, template):
    off = render_chat(inkling, [USER], template=template, enable_thinking=False)
    assert off == render_chat(inkling, [USER], template=template, reasoning_effort="none")
    both = render_chat(inkling, [USER], template=template, enable_thinking=False, reasoning_effort="low")
    assert both == render_chat(inkling, [USER], template=template, reasoning_effort="low")


@BOTH
def test_the_effort_stands_once_before_the_first_message_that_is_not_system(inkling, template):
    system = {"role": "system", "content": "a"}
    shown = "<|message_system|><|content_text|>a<|end_message|>"
    messages = [system, {**system, "role": "developer"}, USER, system, USER]
    text = render_chat(inkling, messages, template=template, add_generation_prompt=False)
    assert text == shown * 2 + EFFORT_TEXT + USER_TEXT + shown + USER_TEXT
    only = render_chat(inkling, [system], template=template, add_generation_prompt=False)
    assert only == shown + EFFORT_TEXT


def test_tk05_the_checkpoints_template_wins(inkling_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((inkling_folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("<|message_user|>{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert render_chat(tokenizer, [USER]) == "<|message_user|>Hi"
    assert encode_chat(tokenizer, [USER]) == [200000, 12194]
    assert render_chat(tokenizer, [USER], template="other") == "other"
    built_in = render_chat(load_tokenizer(inkling_folder), [USER])
    assert built_in == EFFORT_TEXT + USER_TEXT + "<|message_model|>"
    assert render_chat(tokenizer, [USER], template=BUILT_IN) == built_in


@pytest.mark.parametrize("typed", [*control_names(), "".join(control_names()), "a<|end_message", "<"])
@BOTH
def test_tk03_control_strings_in_a_request_stay_text(inkling, template, typed):
    def chat(text):
        tool = {"type": "function", "function": {"name": text, "description": text, "parameters": {text: [text]}}}
        call = {"id": text, "function": {"name": text, "arguments": {"a": {text: [text, 1]}, f"b{text}": text}}}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
        ]
        return encode_chat(inkling, messages, [tool], template=template)

    ids, harmless = chat(typed), chat("word")
    controls = [i for i in ids if i in inkling.special_tokens]
    assert controls == [i for i in harmless if i in inkling.special_tokens]
    assert inkling.decode(ids, False) == inkling.decode(harmless, False).replace("word", typed)


def test_a_typed_control_string_has_the_ids_of_spec_8_1(inkling):
    assert inkling.encode("<|end_message|>") == [27, 91, 419, 13968, 91, 29]


IMAGE, AUDIO = {"type": "image", "num_tokens": 3}, {"type": "audio", "num_tokens": 2}


def shown(ids):
    """A prompt's media: kind marker, number of placeholders, what closes it."""
    ends = {200005: [200010], 200020: [200043, 200010]}
    placeholders = {200005: 200054, 200020: 200053}
    found = []
    for i, token in enumerate(ids):
        if token in ends:
            run = i + 1
            while ids[run] == placeholders[token]:
                run += 1
            found.append(("image" if token == 200005 else "audio", run - i - 1))
            assert ids[run : run + len(ends[token])] == ends[token]
    return found


@BOTH
def test_im10_media_stay_at_their_place_in_every_turn(inkling, template):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, IMAGE]},
        {"role": "user", "content": [AUDIO, {"type": "text", "text": "b"}, IMAGE | {"num_tokens": 1}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE | {"num_tokens": 5}, AUDIO]},
    ]
    ids = encode_chat(inkling, messages, template=template)
    assert shown(ids) == [("image", 3), ("audio", 2), ("image", 1), ("image", 5), ("audio", 2)]
    text = inkling.decode(ids, False)
    user, image = "<|message_user|>", "<|content_image|>" + PLACEHOLDERS["image"]
    assert f"{user}<|content_text|>b<|end_message|>{user}{image}<|end_message|><|message_model|>" in text
    assert text.index("a<|end_message|><|message_system|>") < text.index(image)


@BOTH
def test_im10_placeholders_are_those_of_the_models_config(inkling, template):
    message = {"role": "user", "content": [IMAGE, AUDIO]}
    ids = encode_chat(inkling, [message], template=template, placeholder_ids={"image": 7, "audio": 8})
    assert ids[len(EFFORT) :] == [200000, 200005, 7, 7, 7, 200010, 200000, 200020, 8, 8, 200043, 200010, MODEL]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("<|unused_200054|><|unused_200054|>", "no such part"),
        ("<|unused_200053|>", "no such part"),
        ("text", "leaves out 1"),
    ],
)
def test_im09_a_template_that_does_not_write_each_medium_once_is_refused(inkling, template, says):
    with pytest.raises(InvalidRequest, match=says):
        encode_chat(inkling, [{"role": "user", "content": [IMAGE]}], template=template)


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3", None])
@BOTH
def test_im09_a_medium_without_tokens_is_refused(inkling, template, count):
    with pytest.raises(InvalidRequest, match="at least 1"):
        encode_chat(inkling, [{"role": "user", "content": [IMAGE | {"num_tokens": count}]}], template=template)


def test_media_are_refused_by_a_model_that_has_no_placeholders(tokenizer):
    with pytest.raises(InvalidRequest, match="does not read image"):
        encode_chat(tokenizer, [{"role": "user", "content": [IMAGE]}])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "wizard", "content": "hi"}, "wizard"),
        ({"role": "user", "content": [{"type": "video"}]}, "video"),
        ({"role": "user", "content": 3}, "string or a list"),
        ({"role": "user", "content": "\ud800"}, "surrogate"),
        ({"role": "assistant", "content": "", "reasoning": 3, "tool_calls": []}, "reasoning|accept"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1e999}'}}]},
            "JSON|accept",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}, "JSON"),
    ],
)
def test_malformed_messages_are_refused(inkling, message, says):
    with pytest.raises(InvalidRequest, match=says):
        encode_chat(inkling, [message])


def test_a_tokenizer_that_lacks_a_control_token_is_named(inkling_folder, tmp_path):
    spec = json.loads((inkling_folder / "tokenizer.json").read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "<|content_thinking|>"]
    del spec["model"]["vocab"]["<|content_thinking|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert encode_chat(tokenizer, [USER])[-1] == MODEL
    with pytest.raises(ValueError, match="content_thinking"):
        encode_chat(tokenizer, [{"role": "assistant", "reasoning": "x", "content": "y"}])


TEXTS = st.sampled_from(["", "Hi", "a b", "<|end_message|>", "x<|mess", '{"k": 1}', "Größe\n", "  ", "[IMG]"])
NAMES = st.sampled_from(["search", "get_weather", "é"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 10**12), st.sampled_from([2.5, 0.0, -1.25, 100.0]), TEXTS)
KEYS = st.sampled_from(["a", "b", "Z", "é", "a-b", ""])
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(KEYS, v, max_size=3), max_leaves=5)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3)
PARTS = st.one_of(
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    st.integers(1, 3).map(lambda n: {"type": "image", "num_tokens": n}),
    st.integers(1, 3).map(lambda n: {"type": "audio", "num_tokens": n}),
)
CONTENTS = st.none() | TEXTS | st.lists(PARTS, max_size=3)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["c1", "c2"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": NAMES, "arguments": OBJECTS | OBJECTS.map(json.dumps)}),
        }
    ),
    max_size=2,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user"]), "content": CONTENTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENTS},
        optional={"reasoning_content": TEXTS | st.none(), "reasoning": TEXTS, "tool_calls": CALLS | st.none()},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": CONTENTS},
        optional={"name": NAMES, "tool_call_id": st.sampled_from(["c1", "c2", "c3"]), "is_error": st.booleans()},
    ),
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": NAMES}, optional={"description": TEXTS | st.none(), "parameters": OBJECTS}
            ),
        }
    ),
    max_size=2,
)


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(MESSAGES, max_size=6),
    tools=TOOLS | st.none(),
    effort=st.none() | st.sampled_from([*EFFORTS]) | st.floats(0, 0.99).map(lambda x: round(x, 4)),
    ends_open=st.booleans(),
)
def test_the_template_and_the_built_in_rendering_are_the_same(inkling, messages, tools, effort, ends_open):
    options = {"reasoning_effort": effort, "add_generation_prompt": ends_open}
    by_template = encode_chat(inkling, messages, tools, template=TEMPLATE, **options)
    assert by_template == encode_chat(inkling, messages, tools, template=BUILT_IN, **options)


def test_efforts_of_at_most_two_decimals_are_written_as_they_are():
    for hundredths in range(100):
        assert float(effort_text(hundredths / 100)) == hundredths / 100
