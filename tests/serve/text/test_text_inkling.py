"""Inkling's answers: parsed alike however they are cut, as tokens and as text, broken and cut off."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import InvalidRequest
from serve.text import IncrementalDetokenizer, ParsedMessage, collect, encode_chat
from serve.text.chat_format import answer_parser, parsed_markers
from serve.text.inkling import LONGEST_AUTHOR, InklingParser, State, parse, state_after
from serve.text.inkling_tokens import control_names

IDS = {name: i for i, name in enumerate(control_names(), 199998)}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
M, TEXT, THINK = "<|message_model|>", "<|content_text|>", "<|content_thinking|>"
CALL, END, OVER = "<|content_invoke_tool_json|>", "<|end_message|>", "<|content_model_end_sampling|>"


def call(name="get_weather", arguments='{"city":"Oslo"}', author=None):
    return f'{name if author is None else author}{CALL}{{"name":"{name}","args":{arguments}}}{END}'


OSLO = ("get_weather", '{"city": "Oslo"}')
# An answer to a prompt that ends with the model's role; reasoning, content, calls. A fifth item: content of a stream.
VECTORS = [
    (f"{TEXT}Hello.{END}{OVER}", "", "Hello.", []),
    (f"{THINK}plan{END}{M}{TEXT}Hello.{END}{OVER}", "plan", "Hello.", []),
    (f"{THINK}a{END}{M}{THINK}b{END}{M}{TEXT}c{END}{M}{TEXT}d{END}", "ab", "cd", []),
    (f"{TEXT}\n Hello \n{END}", "", "\n Hello \n", []),
    # PA-09: the header was in the prompt
    (f"{call()}{OVER}", "", "", [OSLO]),
    (call(author=""), "", "", [OSLO]),
    (call(author="someone else"), "", "", [OSLO]),
    # PA-10: text then call, call alone, thinking then call, several calls
    (f"{TEXT}Let me see.{END}{M}{call()}{OVER}", "", "Let me see.", [OSLO]),
    (f"{THINK}plan{END}{M}{call()}{OVER}", "plan", "", [OSLO]),
    (f"{call()}{M}{call('now', '{}')}{M}{TEXT}Done.{END}{OVER}", "", "Done.", [OSLO, ("now", "{}")]),
    (f"{TEXT}a {END}{M}{call()}{M}{TEXT} b{END}", "", "a  b", [OSLO]),
    (f"{TEXT} a {END}{M}{call()}", "", "a", [OSLO], " a "),
    # what a call may look like
    (
        call("now", '{"n": 2.50, "s": "né\\u00e9", "o": {"k": [1, null]}}'),
        "",
        "",
        [("now", '{"n": 2.5, "s": "néé", "o": {"k": [1, null]}}')],
    ),
    (f'now{CALL} {{ "args" : {{}} , "name" : "now" }}\n{END}', "", "", [("now", "{}")]),
    (f'now{CALL}{{"name":"now"}}{END}', "", "", [("now", "{}")]),
    (call("now", f'{{"s": "{M} {TEXT} {OVER[:-1]}"}}'), "", "", [("now", f'{{"s": "{M} {TEXT} {OVER[:-1]}"}}')]),
    (f"{TEXT}x{END}{M}{call('nope', '{}')}{M}{TEXT}y{END}", "", "xy", []),
    # PA-12: broken calls are text
    (f"{TEXT}a{END}{M}now{CALL}{{bad{END}{M}{TEXT}b{END}", "", "a{badb", []),
    (f"{CALL}[1]{END}", "", "[1]", []),
    (f"{CALL}null{END}", "", "null", []),
    (f'{CALL}{{"args":{{}}}}{END}', "", '{"args":{}}', []),
    (f'{CALL}{{"name":3,"args":{{}}}}{END}', "", '{"name":3,"args":{}}', []),
    (f'{CALL}{{"name":"","args":{{}}}}{END}', "", '{"name":"","args":{}}', []),
    (f'{CALL}{{"name":"now","args":[]}}{END}', "", '{"name":"now","args":[]}', []),
    (f'{CALL}{{"name":"now","args":{{"x":NaN}}}}{END}', "", '{"name":"now","args":{"x":NaN}}', []),
    (f'{CALL}{{"name":"now","args":{{"x":1e999}}}}{END}', "", '{"name":"now","args":{"x":1e999}}', []),
    (f"{CALL}{'[' * 5000}{END}", "", "[" * 5000, []),
    (f'{CALL}{{"name":"now","args":{{}}}} and more{END}', "", '{"name":"now","args":{}} and more', []),
    (f"{CALL}{END}", "", "", []),
    # PA-12: calls cut off are text
    (f'{TEXT}a{END}{M}now{CALL}{{"name":"now","ar', "", 'a{"name":"now","ar', []),
    (f'now{CALL}{{"name":"now","args":{{}}}}', "", '{"name":"now","args":{}}', []),
    (f'now{CALL}{{"name":"now","args":{{}}}}{OVER}', "", '{"name":"now","args":{}}', []),
    (f"{call()}{M}now{CALL}{{", "", "{", [OSLO]),
    # PA-15: cut off anywhere
    (f"{THINK}pla", "pla", "", []),
    (f"{THINK}plan{END}{M}{TEXT}Hel", "plan", "Hel", []),
    (f"{THINK}plan{END}{M}", "plan", "", []),
    (f"{THINK}plan{END}", "plan", "", []),
    ("", "", "", []),
    # answers without a header
    ("Hello.", "", "Hello.", []),
    (f"Hello.{END}{OVER}", "", "Hello.", []),
    (f"Hello.{OVER}", "", "Hello.", []),
    (f"Hello.{M}{TEXT}x{END}", "", "Hello.x", []),
    (f"{THINK}plan{END}Hello.{END}", "plan", "Hello.", []),
    (f"{TEXT}a{END} b{M}c{TEXT}d{END}", "", "a bd", []),
    (f" \n{END}", "", "", []),
    ("x" * LONGEST_AUTHOR + f"{TEXT}y{END}", "", "y", []),
    ("x" * (LONGEST_AUTHOR + 1) + f"{TEXT}y{END}", "", "x" * (LONGEST_AUTHOR + 1) + "y", []),
    # inside a payload other control tokens are text
    (f"{TEXT}a{THINK}b{M}c<|unused_200030|>{END}", "", f"a{THINK}b{M}c<|unused_200030|>", []),
    (f"{THINK}a{M}{TEXT}b{END}{M}{TEXT}c{END}", f"a{M}{TEXT}b", "c", []),
    # outside of one they are nothing
    (f"<|unused_200030|>{TEXT}a{END}<|audio_end|><|endoftext|>{OVER}{END}", "", "a", []),
    (f"{M}{M}al{TEXT}a{END}", "", "a", []),
    # other kinds are text, other roles are not the assistant's
    (f"<|content_invoke_tool_text|>look it up{END}", "", "look it up", []),
    (f"<|content_tool_error|>e{END}{M}<|content_xml|><x/>{END}", "", "e<x/>", []),
    (f"{TEXT}a{END}<|message_tool|>now{TEXT}12:00{END}<|message_user|>{TEXT}q{END}{M}{TEXT}b{END}", "", "ab", []),
]
IDENTIFIERS = range(len(VECTORS))


def splits(answer):
    """The answer in one piece, in chunks of several sizes, and cut in two at every character."""
    yield [answer]
    for size in (1, 3, 7, 64):
        yield [answer[i : i + size] for i in range(0, len(answer), size)]
    if len(answer) < 500:
        for cut in range(1, len(answer)):
            yield [answer[:cut], answer[cut:]]


def as_tokens(answer):
    """Control tokens as themselves, and every other character as a token of its own."""
    pieces, start = [], 0
    while start < len(answer):
        name = next((name for name in IDS if answer.startswith(name, start)), None)
        pieces.append((IDS[name], name) if name else (ord(answer[start]), answer[start]))
        start += len(pieces[-1][1])
    return pieces


def summary(deltas):
    whole = collect(deltas)
    calls = [(c.name, c.arguments) for c in whole.tool_calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def stream(pieces, tools=TOOLS, **options):
    parser = InklingParser(tools, special_token_ids=IDS, **options)
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()


def stream_tokens(answer, size, tools=TOOLS, **options):
    parser, tokens = InklingParser(tools, special_token_ids=IDS, **options), as_tokens(answer)
    deltas = [delta for i in range(0, len(tokens), size) for delta in parser.push_tokens(tokens[i : i + size])]
    return deltas + parser.finish()


@pytest.mark.parametrize("vector", VECTORS, ids=IDENTIFIERS)
def test_pa09_pa10_pa12_pa15_vectors_at_every_split(vector):
    answer, reasoning, content, calls, *streamed = vector
    expected = (reasoning, streamed[0] if streamed else content, calls)
    for pieces in splits(answer):
        deltas = stream(pieces)
        assert summary(deltas) == expected
        assert all(sum(map(bool, (d.reasoning, d.content, d.tool_calls))) == 1 for d in deltas)
    whole = parse(answer, TOOLS, special_token_ids=IDS)
    assert (whole.reasoning, whole.content, [(c.name, c.arguments) for c in whole.tool_calls]) == vector[1:4]


@pytest.mark.parametrize("vector", VECTORS, ids=IDENTIFIERS)
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pa10_vectors_as_tokens_in_chunks(vector, size):
    answer, reasoning, content, calls, *streamed = vector
    deltas = stream_tokens(answer, size)
    assert summary(deltas) == (reasoning, streamed[0] if streamed else content, calls)
    assert parse(as_tokens(answer), TOOLS, special_token_ids=IDS).content == content


@pytest.mark.parametrize("vector", VECTORS, ids=IDENTIFIERS)
def test_a_prompt_without_the_models_role_gives_the_same(vector):
    """The model then writes its role itself; an answer that lacks it too is an answer without a header."""
    answer, reasoning, content, calls, *streamed = vector
    expected = (reasoning, streamed[0] if streamed else content, calls)
    assert summary(stream([M + answer], state=State.OUTSIDE)) == expected
    assert summary(stream_tokens(M + answer, 1, state=State.OUTSIDE)) == expected


FRAGMENTS = [
    *control_names()[2:13],
    CALL,
    "<|audio_end|>",
    "now",
    '{"name":"now","args":{}}',
    '"',
    "{",
    " ",
    "x",
    "<",
    "<|",
    "|>",
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)


@settings(max_examples=400, deadline=None)
@given(answer=ANSWERS, cuts=st.lists(st.integers(0, 300)), state=st.sampled_from([*State]))
def test_pa15_any_answer_cut_anywhere(answer, cuts, state):
    whole = summary(stream([answer], state=state))
    bounds = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    assert summary(stream([answer[a:b] for a, b in itertools.pairwise(bounds)], state=state)) == whole
    assert summary(stream(list(answer), state=state)) == whole
    parsed = parse(answer, TOOLS, special_token_ids=IDS, state=state)
    assert (parsed.reasoning, [(c.name, c.arguments) for c in parsed.tool_calls]) == (whole[0], whole[2])
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


@settings(max_examples=200, deadline=None)
@given(answer=ANSWERS, cuts=st.lists(st.integers(0, 100)), state=st.sampled_from([*State]))
def test_tokens_cut_anywhere_and_the_same_as_text(answer, cuts, state):
    tokens = as_tokens(answer)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    parser = InklingParser(TOOLS, special_token_ids=IDS, state=state)
    deltas = [d for a, b in itertools.pairwise(bounds) for d in parser.push_tokens(tokens[a:b])]
    assert summary(deltas + parser.finish()) == summary(stream([answer], state=state))


def test_pa09_a_call_whose_header_was_in_the_prompt(inkling):
    prompt = encode_chat(inkling, [{"role": "user", "content": "Hi"}], TOOLS)
    assert prompt[-1] == IDS[M]
    parser = answer_parser(inkling, prompt, TOOLS)
    (delta,) = parser.push_tokens(as_tokens(call())) + parser.finish()
    (made,) = delta.tool_calls
    assert (delta.content, made.index, made.name, made.arguments) == ("", 0, *OSLO)
    assert made.id.startswith("call_")


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pa12_no_delta_for_a_call_until_it_is_complete(size):
    answer = f"{TEXT}before{END}{M}{call()}"
    tokens = as_tokens(answer)
    for end in range(len(tokens)):
        parser = InklingParser(TOOLS, special_token_ids=IDS)
        deltas = [d for i in range(0, end, size) for d in parser.push_tokens(tokens[i : min(i + size, end)])]
        assert not any(delta.tool_calls for delta in deltas + parser.finish())
    assert summary(stream_tokens(answer, size))[2] == [OSLO]


def test_pa15_one_shot_and_stream_agree_wherever_the_answer_is_cut():
    tokens = as_tokens(f"{THINK}plan{END}{M}{TEXT}Hello{END}{M}{call()}{OVER}")
    for end in range(len(tokens) + 1):
        parser = InklingParser(TOOLS, special_token_ids=IDS)
        streamed = summary([d for token in tokens[:end] for d in parser.push_tokens([token])] + parser.finish())
        whole = parse(tokens[:end], TOOLS, special_token_ids=IDS)
        assert (whole.reasoning, whole.content) == streamed[:2]
        assert whole.reasoning == "plan"[: max(end - 1, 0)]
    assert streamed == ("plan", "Hello", [OSLO])


def test_pa17_a_demanded_call_is_checked():
    named = {"type": "function", "function": {"name": "now"}}
    assert parse(f"{TEXT}no{END}", TOOLS, "required").choice_honoured is False
    assert parse(call("nope"), TOOLS, "required").choice_honoured is False
    assert parse(call("now")[: -len(END)], TOOLS, "required").choice_honoured is False
    assert parse(call("now"), TOOLS, "required").choice_honoured is True
    other = parse(call(), TOOLS, named)
    assert (other.tool_calls, other.choice_honoured) == ((), False)
    both = parse(call() + M + call("now"), TOOLS, named)
    assert ([c.name for c in both.tool_calls], both.choice_honoured) == (["now"], True)
    assert parse(f"{TEXT}no{END}", TOOLS).choice_honoured is True
    assert parse(f"{TEXT}a{END}{M}{call()}", TOOLS, "none") == ParsedMessage("", "a")


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        (None, "required", "at least one"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, "'x'"),
        (TOOLS, "any", "unknown"),
    ],
)
def test_pa17_a_choice_that_cannot_be_met_is_refused(tools, choice, says):
    with pytest.raises(InvalidRequest, match=says):
        InklingParser(tools, choice)


def test_without_tools_any_name_passes():
    (made,) = parse(call("anything")).tool_calls
    assert (made.name, made.arguments) == ("anything", '{"city": "Oslo"}')


def test_every_call_gets_its_own_number_and_id():
    deltas = stream([f"{call()}{M}{call('nope')}{M}{call('now')}"])
    made = [part for delta in deltas for part in delta.tool_calls]
    assert [part.index for part in made] == [0, 1]
    assert made[0].id != made[1].id


def test_markers_spelled_in_other_tokens_are_text():
    spelled = [(None, character) for character in f"say {END} or {M}{CALL}{{}} {OVER}"]
    answer = [(IDS[TEXT], TEXT), *spelled, (IDS[END], END)]
    assert parse(answer, TOOLS, special_token_ids=IDS) == ParsedMessage("", "".join(text for _, text in spelled))


def test_thinking_and_text_are_shown_as_they_come():
    parser = InklingParser(special_token_ids=IDS)
    shown = [summary(parser.push_tokens([token]))[:2] for token in as_tokens(f"{THINK}ab{END}{M}{TEXT}cd")]
    assert shown == [("", ""), ("a", ""), ("b", ""), ("", ""), ("", ""), ("", ""), ("", "c"), ("", "d")]


def test_held_text_is_at_most_the_beginning_of_a_marker():
    parser = InklingParser(special_token_ids=IDS, state=State.CONTENT)
    answer = "a < b <| c <|end_messag d"
    shown = ""
    for count, character in enumerate(answer, 1):
        shown += "".join(delta.content for delta in parser.push(character))
        assert count - len(shown) < len(OVER)
    assert shown + "".join(delta.content for delta in parser.finish()) == answer


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"<|message_user|>{TEXT}q{END}{M}", State.HEADER),
        (f"<|message_user|>{TEXT}q{END}{M}now", State.HEADER),
        (f"<|message_user|>{TEXT}q{END}", State.OUTSIDE),
        (f"{M}{TEXT}a{END}{OVER}", State.OUTSIDE),
        (f"<|message_user|>{TEXT}q{END}{M}{TEXT}To begin", State.CONTENT),
        (f"<|message_user|>{TEXT}q{END}{M}{THINK}", State.REASONING),
        (f"{M}{CALL}", State.CALL),
        ("", State.OUTSIDE),
        ("no control tokens", State.OUTSIDE),
    ],
)
def test_where_the_answer_begins(prompt, expected):
    assert state_after([token_id for token_id, _ in as_tokens(prompt)], IDS) is expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_both_styles_of_prompt(inkling, add_generation_prompt):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = encode_chat(inkling, messages, add_generation_prompt=add_generation_prompt)
    answer = ("" if add_generation_prompt else M) + f"{THINK}plan{END}{M}al{TEXT}Hi{END}"
    parser = answer_parser(inkling, prompt)
    assert summary(parser.push_tokens(as_tokens(answer)) + parser.finish()) == ("plan", "Hi", [])


def test_what_is_rendered_is_parsed_back(inkling):
    """A turn of the history, as the prompt holds it, is what the model would have answered."""
    made = {"function": {"name": "get_weather", "arguments": {"city": "Köln", "n": [1, 2.5]}}}
    turn = {
        "role": "assistant",
        "reasoning": "I should call",
        "content": "Calling <|end_message|>.",
        "tool_calls": [made],
    }
    question = [{"role": "user", "content": "Weather?"}]
    prompt = encode_chat(inkling, question)
    whole = encode_chat(inkling, [*question, turn], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    pieces = IncrementalDetokenizer(inkling, keep=parsed_markers(inkling)).pieces(whole[len(prompt) :])
    parser = answer_parser(inkling, prompt)
    parsed = collect(parser.push_tokens(pieces) + parser.finish())
    assert (parsed.reasoning, parsed.content) == (turn["reasoning"], turn["content"])
    (found,) = parsed.tool_calls
    assert (found.name, json.loads(found.arguments)) == ("get_weather", made["function"]["arguments"])
