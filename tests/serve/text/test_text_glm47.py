"""The glm47 parser: every vector of the format, however the answer is cut, as text and as tokens."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import InvalidRequest
from serve.text import ParsedMessage, StopStrings, collect
from serve.text.glm47 import ARGUMENT_TAGS, BLOCK_TAGS, ROLES, Glm47Parser, parse, starts_in_reasoning

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "u": {"type": ["string", "null"]},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "f": {"type": "number"},
    "b": {"type": "boolean"},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
IDS = {tag: 100 + i for i, tag in enumerate((*BLOCK_TAGS, *ARGUMENT_TAGS, *ROLES, "<|endoftext|>"))}


def call(name="get_weather", /, **arguments):
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def weather(arguments):
    return ("get_weather", arguments)


# answer, reasoning, content, calls; a fifth item where the content of a stream differs (it is not stripped)
VECTORS = [
    ("I think</think>Answer.", "I think", "Answer.", []),
    ("only thinking", "only thinking", "", []),
    ("<think>abc</think>xyz", "abc", "xyz", []),
    ("\nabc \n\n</think>\n\nxyz\n", "\nabc", "\n\nxyz\n", []),
    ("</think>hello", "", "hello", []),
    (
        "r</think>Sure. " + call(city="Oslo", days=3),
        "r",
        "Sure.",
        [weather('{"city": "Oslo", "days": 3}')],
        "Sure. ",
    ),
    ("r<tool_call>now</tool_call>", "r", "", [("now", "{}")]),
    (
        "r</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "r",
        "",
        [weather('{"city": "Oslo"}')],
    ),
    (
        "</think><tool_call>get_weather<arg_key> city </arg_key><arg_value> Oslo \n</arg_value></tool_call>",
        "",
        "",
        [weather('{"city": " Oslo \\n"}')],
    ),
    (
        "</think>" + call(city="5", o='{"k": 1}', a="[1, 2]", f="2.0", b="True", u="null", zz="7"),
        "",
        "",
        [weather('{"city": "5", "o": {"k": 1}, "a": [1, 2], "f": 2, "b": true, "u": null, "zz": "7"}')],
    ),
    ("</think>" + call(days="abc"), "", "", [weather('{"days": "abc"}')]),
    ("</think>" + call(days=" 3 "), "", "", [weather('{"days": 3}')]),
    ("</think>" + call(f="1e999"), "", "", [weather('{"f": "1e999"}')]),
    ("</think>" + call(o="{bad}"), "", "", [weather('{"o": "{bad}"}')]),
    ("</think>" + call(city="null"), "", "", [weather('{"city": "null"}')]),
    ("</think>" + call(city="a<b && c</arg_valu x"), "", "", [weather('{"city": "a<b && c</arg_valu x"}')]),
    ("</think>" + call(city="a<tool_call>b"), "", "", [weather('{"city": "a<tool_call>b"}')]),
    ("</think>" + call(days=1, city="a</tool_call>b"), "", "b</arg_value></tool_call>", [weather('{"days": 1}')]),
    ("r</think>a" + call("nope", k="v") + "b", "r", "ab", []),
    ("r</think>see <arg_key>k</arg_key> here", "r", "see <arg_key>k</arg_key> here", []),
    ("r</think>x</tool_call>y", "r", "x</tool_call>y", []),
    ("r</think>x</think>y", "r", "xy", []),
    ("r</think>text<tool_call>get_wea", "r", "text", []),
    ("r</think>text<tool_c", "r", "text<tool_c", []),
    ("r</think>done<|user|>", "r", "done", []),
    ("I could use <tool_call> to do it</think>ok", "I could use", "", []),
    # The four defects of other parsers.
    ("r</think>t<tool_call>get_weather<arg_key>city</arg_key><arg_value>Os", "r", "t", []),
    (
        "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value><arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        "",
        "",
        [weather('{"city": "Oslo", "days": 2}')],
    ),
    ("r</think>before" + call("now") + "after", "r", "beforeafter", [("now", "{}")]),
    ("one</think>x<think> two </think>y<think>z", "one two z", "xy", []),
    # Several calls, white space between and after them, text between an argument's tags.
    (
        "</think>" + call("now") + "\n" + call(city="ñ") + "\n",
        "",
        "",
        [("now", "{}"), weather('{"city": "ñ"}')],
    ),
    (
        "</think> " + call("now") + " and " + call("now"),
        "",
        "and",
        [("now", "{}"), ("now", "{}")],
        " and ",
    ),
    (
        "</think><tool_call>get_weather<arg_key>u</arg_key>?<arg_key>days</arg_key>?<arg_value>1</arg_value>?</tool_call>",
        "",
        "",
        [weather('{"days": 1}')],
    ),
    ("</think>a" + call("now") + "\n" + call("now") + " ", "", "a", [("now", "{}"), ("now", "{}")]),
    ("</think>" + call(city="x") + call(days=1), "", "", [weather('{"city": "x"}'), weather('{"days": 1}')]),
    ("r</think>\n\n", "r", "\n\n", []),
    ("</think><tool_call></tool_call>x", "", "x", []),
    ("</think>a<|assistant|>b<|endoftext|>", "", "ab", []),
    ("", "", "", []),
]


def stream(pieces, **options):
    """Raw deltas, and what they amount to without the stripping of a whole answer."""
    parser = Glm47Parser(TOOLS, make_call_id=lambda: "id", **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return deltas, summary(deltas)


def summary(deltas):
    whole = collect(deltas)
    calls = [(c.name, c.arguments) for c in whole.tool_calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def as_tokens(answer):
    """Tags as their control tokens, everything else one character a token."""
    tokens, rest = [], answer
    while rest:
        tag = next((tag for tag in IDS if rest.startswith(tag)), rest[0])
        tokens.append((IDS.get(tag), tag))
        rest = rest[len(tag) :]
    return tokens


def splits(text):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield from ([text[i : i + size] for i in range(0, len(text), size)] for size in range(1, len(text) + 1))


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_pa03_pa06_vectors_at_every_split(vector):
    answer, reasoning, content, calls, *streamed_content = vector
    whole = parse(answer, TOOLS)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [(c.name, c.arguments) for c in whole.tool_calls] == calls
    expected = (reasoning, streamed_content[0] if streamed_content else content, calls)
    for pieces in splits(answer):
        deltas, result = stream(pieces)
        assert result == expected
        assert all(sum(map(bool, (d.reasoning, d.content, d.tool_calls))) == 1 for d in deltas)


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_vectors_as_tokens(vector, size):
    tokens = as_tokens(vector[0])
    parser = Glm47Parser(TOOLS, special_token_ids=IDS)
    deltas = [delta for i in range(0, len(tokens), size) for delta in parser.push_tokens(tokens[i : i + size])]
    assert summary(deltas + parser.finish()) == stream([vector[0]])[1]
    assert parse(tokens, TOOLS, special_token_ids=IDS).content == vector[2]


FRAGMENTS = [
    *BLOCK_TAGS,
    *ARGUMENT_TAGS,
    "<|user|>",
    "get_weather",
    "now",
    "city",
    "days",
    "3",
    " ",
    "\n",
    "x",
    "<",
    "</",
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@settings(max_examples=400, deadline=None)
@given(answer=ANSWERS, cuts=st.lists(st.integers(0, 200)), thinking=st.booleans())
def test_pa14_any_answer_cut_anywhere(answer, cuts, thinking):
    whole = stream([answer], thinking=thinking)[1]
    bounds = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[a:b] for a, b in itertools.pairwise(bounds)]
    assert stream(pieces, thinking=thinking)[1] == whole
    assert stream(list(answer), thinking=thinking)[1] == whole
    parsed = parse(answer, TOOLS, thinking)
    assert (parsed.reasoning, [(c.name, c.arguments) for c in parsed.tool_calls]) == (whole[0], whole[2])
    assert parsed.content == (whole[1].strip() if whole[2] else whole[1])
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


@settings(max_examples=200, deadline=None)
@given(answer=ANSWERS, cuts=st.lists(st.integers(0, 60)))
def test_tokens_cut_anywhere(answer, cuts):
    tokens = as_tokens(answer)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    parser = Glm47Parser(TOOLS, special_token_ids=IDS)
    deltas = [d for a, b in itertools.pairwise(bounds) for d in parser.push_tokens(tokens[a:b])]
    whole = Glm47Parser(TOOLS, special_token_ids=IDS)
    assert summary(deltas + parser.finish()) == summary(whole.push_tokens(tokens) + whole.finish())


def test_pa01_call_without_arguments():
    for pieces in splits("<tool_call>list_open_orders</tool_call>"):
        parser = Glm47Parser(None)
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
        assert summary(deltas) == ("", "", [("list_open_orders", "{}")])
    assert [c.arguments for c in parse("<tool_call>list_open_orders</tool_call>").tool_calls] == ["{}"]


def test_pa03_typed_arguments_at_every_character():
    schema = {
        name: {"type": kind}
        for name, kind in zip("iodanb", ("integer", "object", "array", "null", "number", "boolean"), strict=True)
    }
    schema |= {"s": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": schema}}}]
    written = {"i": "7", "s": "7up", "o": '{"a":{"b":2}}', "d": "[3,4]", "a": "null", "b": "true"}
    typed = {"i": 7, "s": "7up", "o": {"a": {"b": 2}}, "d": [3, 4], "a": None, "b": True}
    parser = Glm47Parser(tools)
    deltas = [delta for character in call("f", **written) for delta in parser.push(character)] + parser.finish()
    streamed = "".join(part.arguments for delta in deltas for part in delta.tool_calls)
    assert json.loads(streamed) == typed
    assert parse(call("f", **written), tools).tool_calls[0].arguments == streamed


def test_pa06_two_calls_the_first_without_arguments():
    for pieces in splits(call("now") + call(city="Oslo")):
        calls = stream(pieces)[1][2]
        assert [json.loads(arguments) for _, arguments in calls] == [{}, {"city": "Oslo"}]
    deltas, _ = stream([call("now") + call("nope") + call("now")])
    assert [part.index for delta in deltas for part in delta.tool_calls] == [0, 1]


def test_pa07_reasoning_follows_the_prompt():
    assert starts_in_reasoning("<|user|>x<|assistant|><think>")
    for pieces in splits("plan</think>Hi"):
        assert stream(pieces, thinking=True)[1] == ("plan", "Hi", [])
    assert parse("plan</think>Hi") == ParsedMessage("plan", "Hi")
    assert stream(["H", "i"], thinking=False)[1] == ("", "Hi", [])
    assert parse("Hi", thinking=False) == ParsedMessage("", "Hi")
    assert parse("Hi", in_reasoning=False) == ParsedMessage("", "Hi")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|user|>x<|assistant|><think>", True),
        ("<|user|>x<|assistant|></think>", False),
        ("<|assistant|></think>old<|user|>x<|assistant|>", True),
        ("<|assistant|><think>r</think>see<tool_call>now", False),
        ("<|system|>write <tool_call>name<|user|>x", True),
        ("no tags at all", True),
        ("", True),
    ],
)
def test_where_the_answer_starts(prompt, expected):
    assert starts_in_reasoning(prompt) is expected
    tokens = [token_id if token_id is not None else 1 for token_id, _ in as_tokens(prompt)]
    assert starts_in_reasoning(tokens, special_token_ids=IDS) is expected
    assert starts_in_reasoning(prompt, thinking=False) is False


def test_a_prompt_of_ids_needs_the_control_tokens():
    with pytest.raises(ValueError, match="special_token_ids"):
        starts_in_reasoning([1, 2])


def test_pa12_visible_text_survives_and_a_call_cut_off_yields_no_delta():
    answer = "</think>before " + call(o="{broken") + " after"
    assert stream([answer])[1] == ("", "before  after", [weather('{"o": "{broken"}')])
    for end in range(len("</think>before <tool_call>"), len("</think>before ") + len(call(city="Oslo"))):
        cut = ("</think>before " + call(city="Oslo"))[:end]
        for pieces in ([cut], list(cut)):
            deltas, result = stream(pieces)
            assert result == ("", "before ", [])
            assert not any(delta.tool_calls for delta in deltas)
        assert parse(cut, TOOLS) == ParsedMessage("", "before ")


def test_pa14_without_reasoning_parsing_think_tags_are_text():
    answer = "<think>x</think>y"
    assert parse(answer, thinking=False) == ParsedMessage("", answer)
    for pieces in splits(answer):
        assert stream(pieces, thinking=False)[1] == ("", answer, [])
    assert parse(as_tokens(answer), thinking=False, special_token_ids=IDS) == ParsedMessage("", answer)


def test_pa17_a_demanded_call_is_checked():
    named = {"type": "function", "function": {"name": "now"}}
    assert parse("</think>no", TOOLS, tool_choice="required").choice_honoured is False
    assert parse("</think>" + call("nope"), TOOLS, tool_choice="required").choice_honoured is False
    assert parse("</think>" + call("now"), TOOLS, tool_choice="required").choice_honoured is True
    other = parse("</think>" + call(city="Oslo"), TOOLS, tool_choice=named)
    assert (other.tool_calls, other.choice_honoured) == ((), False)
    both = parse("</think>" + call(city="Oslo") + call("now"), TOOLS, tool_choice=named)
    assert ([c.name for c in both.tool_calls], both.choice_honoured) == (["now"], True)
    assert parse("</think>no", TOOLS).choice_honoured is True


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (None, "required", "at least one"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "'nope'"),
        (TOOLS, "any", "unknown"),
        (TOOLS, {"type": "custom"}, "unknown"),
        ([{"type": "function"}], "auto", "name"),
        ([{"type": "function", "function": None}], "auto", "name"),
        (TOOLS, {"type": "function", "function": "now"}, "None"),
    ],
)
def test_pa17_a_choice_that_cannot_be_met_is_refused(tools, choice, message):
    with pytest.raises(InvalidRequest, match=message):
        Glm47Parser(tools, tool_choice=choice)


def test_tool_choice_none_removes_calls():
    answer = "r</think>Text " + call("now") + " more"
    assert stream([answer], tool_choice="none")[1] == ("r", "Text  more", [])
    assert parse(answer, TOOLS, tool_choice="none") == ParsedMessage("r", "Text  more")


def test_without_tools_any_name_passes_and_values_are_strings():
    (found,) = parse(call("anything", k="7")).tool_calls
    assert (found.name, found.arguments) == ("anything", '{"k": "7"}')


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_pa19_text_held_for_a_stop_string_passes_the_parser(size):
    """An unmatched stop string of 8 characters, with tags just before the end of the answer."""
    answer = "plan</think>Sure" + call("now") + "STOPWOR"
    stops, parser = StopStrings(["STOPWORD"]), Glm47Parser(TOOLS)
    deltas = []
    for start in range(0, len(answer), size):
        deltas += parser.push(stops.push(answer[start : start + size]))
    deltas += parser.push(stops.flush()) + parser.finish()
    assert stops.matched is None
    assert summary(deltas) == ("plan", "SureSTOPWOR", [("now", "{}")])


def test_tags_spelled_in_other_tokens_are_text():
    spelled = [(None, character) for character in "say <think> and </think> or <tool_call>now</tool_call> <|user|>"]
    answer = [(None, "r"), (IDS["</think>"], "</think>"), *spelled]
    parsed = parse(answer, TOOLS, special_token_ids=IDS)
    assert parsed == ParsedMessage("r", "".join(text for _, text in spelled))
    value = [(None, c) for c in "<arg_key>city</arg_key><arg_value>a</tool_call>b</arg_value>"]
    tokens = [(IDS["<tool_call>"], "<tool_call>"), (None, "get_weather"), *value, (IDS["</tool_call>"], "</tool_call>")]
    (found,) = parse(tokens, TOOLS, special_token_ids=IDS).tool_calls
    assert found.arguments == '{"city": "a</tool_call>b"}'


def test_a_control_token_does_not_complete_a_tag_spelled_in_other_tokens():
    tokens = [(IDS["<tool_call>"], "<tool_call>"), (None, "now<arg"), (IDS["</tool_call>"], "</tool_call>")]
    (found,) = parse(tokens, special_token_ids=IDS).tool_calls
    assert found.name == "now<arg"
    tokens[2:2] = [(IDS["<|user|>"], "<|user|>"), (None, "_key>")]
    (found,) = parse(tokens, special_token_ids=IDS).tool_calls
    assert found.name == "now<arg_key>"


def test_a_tag_the_tokenizer_does_not_have_is_matched_as_text():
    ids = {tag: token_id for tag, token_id in IDS.items() if tag != "</think>"}
    assert parse([(None, c) for c in "r</think>x"], special_token_ids=ids) == ParsedMessage("r", "x")


def test_held_text_is_at_most_one_character_less_than_the_longest_marker():
    answer = "</think>text " * 3 + "< <| <|observation| <tool_cal </arg_value"
    parser = Glm47Parser(TOOLS)
    shown = ""
    for count, character in enumerate(answer, 1):
        shown += "".join(delta.content for delta in parser.push(character))
        visible = answer[:count].replace("</think>", "")
        assert len(visible) - len(shown) <= len("<|observation|>") - 1


def test_every_call_gets_its_own_id():
    first, second = parse(call("now") + call("now"), TOOLS).tool_calls
    assert first.id != second.id
    assert first.id.startswith("call_")
