"""Prompts and answers against tml-renderers, over random conversations and its whole vocabulary.

Not part of the suite, as it needs PyTorch: pip install -r requirements/oracle.in, then
python -m pytest tests/oracle/test_tml_renderers.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tml

from serve.text import IncrementalDetokenizer, collect, encode_chat, load_tokenizer
from serve.text.chat_template import BUILT_IN
from serve.text.inkling import InklingParser, State
from serve.text.inkling_prompt import effort_text

ROOT = Path(__file__).parents[2]
TEMPLATE = (ROOT / "checkpoints/training/inkling/chat_template.jinja").read_text("utf-8")
WORDS = (
    'the weather in Köln is 12.50 degrees, isn\'t it? \n\n 東京 한국어 문장 👩‍🚀 ñ مرحبا {"k": [1, null]} <b> a/b\\n '
    "<|end_message|> <|message_system|> <|content_text|> <|unused_200054|> <|endoftext|> "
    "def f(x): return x+1\t é ½ HTTPServer"
).split(" ")
NAMES = ["get_weather", "search", "mcp.server-1/tool", "läuft"]
SCALARS = [0, 1, -7, 2.5, -0.25, 100.0, 1e15, True, False, None, 2**53, 123456.789]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("o200k") / "tokenizer.model"
    file.symlink_to(Path(tml.chat.__file__).parent / "data" / "o200k_base.tiktoken")
    return load_tokenizer(file)


def words(rng: random.Random) -> str:
    return rng.choice(["", " ", ""]).join(
        rng.choice(WORDS) + rng.choice(["", " ", "\n"]) for _ in range(rng.randint(1, 9))
    )


def value(rng: random.Random, depth: int = 0):
    kind = rng.random()
    if kind < 0.6 or depth == 3:
        return rng.choice([*SCALARS, words(rng)])
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice("abcxyzAÉ") + str(rng.randint(0, 99)): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def sorted_value(rng: random.Random):
    """Nested keys in order already: the package sorts the arguments' outermost keys only, this project all."""
    return json.loads(json.dumps(value(rng), sort_keys=True))


def parts(rng: random.Random, media: bool) -> list[dict]:
    made = []
    for _ in range(rng.randint(1, 3)):
        if media and rng.random() < 0.3:
            made.append({"type": rng.choice(["image", "audio"]), "num_tokens": rng.randint(2, 4)})
        else:
            made.append({"type": "text", "text": rng.choice(["", words(rng), words(rng)])})
    return made


def conversation(rng: random.Random, any_key: bool = True) -> tuple[list[dict], list[dict] | None, float]:
    roles = rng.choices(["system", "developer"], k=rng.randint(0, 2))
    messages: list[dict] = [{"role": role, "content": words(rng)} for role in roles]
    for turn in range(rng.randint(1, 4)):
        media = rng.random() < 0.3
        messages.append({"role": "user", "content": rng.choice([words(rng), "", parts(rng, media)])})
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": words(rng)})
        answer: dict = {"role": "assistant", "content": rng.choice([words(rng), "", None, parts(rng, False)])}
        if rng.random() < 0.5:
            answer[rng.choice(["reasoning", "reasoning_content"])] = words(rng)
        calls = []
        for number in range(rng.choice([0, 0, 1, 2])):
            arguments = {
                rng.choice("abcxyz") + (words(rng) if any_key else ""): sorted_value(rng)
                for _ in range(rng.randint(0, 3))
            }
            function = {"name": rng.choice(NAMES), "arguments": json.dumps(arguments, ensure_ascii=rng.random() < 0.5)}
            calls.append({"id": f"call-{turn}-{number}", "type": "function", "function": function})
        if calls:
            answer["tool_calls"] = calls
        messages.append(answer)
        for call in calls:
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": rng.choice([words(rng), "", parts(rng, False)]),
            }
            if rng.random() < 0.3:
                result["name"] = rng.choice(NAMES)
            if rng.random() < 0.2:
                result["is_error"] = True
            messages.append(result)
    tools = None
    if rng.random() < 0.5:
        tools = []
        for _ in range(rng.randint(1, 3)):
            function = {"name": rng.choice(NAMES), "parameters": {"type": "object", "properties": {"p": value(rng)}}}
            if rng.random() < 0.7:
                function["description"] = words(rng)
            tools.append({"type": "function", "function": function})
    return messages, tools, rng.choice([0, 0.1, 0.2, 0.7, 0.9, 0.99, round(rng.random() * 0.99, 3)])


@pytest.mark.parametrize("template", [BUILT_IN, TEMPLATE], ids=["built-in", "template"])
@pytest.mark.parametrize("seed", range(10))
def test_prompts_of_random_conversations(tokenizer, template, seed):
    rng = random.Random(seed)
    for _ in range(50):
        # What a template is given in the place of a control token's text sorts differently.
        messages, tools, effort = conversation(rng, any_key=template == BUILT_IN)
        options = {"template": template, "reasoning_effort": effort, "add_generation_prompt": False}
        expected = tml.render(messages, tools, effort)
        assert encode_chat(tokenizer, messages, tools, **options) == expected, json.dumps([messages, tools, effort])


def test_ordinary_text(tokenizer):
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(
            chr(
                rng.choice(
                    [rng.randint(0, 127), rng.randint(0, 0x2FFF), rng.randint(0, 0xD7FF), rng.randint(0x1F300, 0x1FAFF)]
                )
            )
            for _ in range(rng.randint(0, 30))
        )
        for line in (text, words(rng) + text):
            assert tokenizer.encode(line) == tml.TOKENIZER.encode_ordinary(line)


def test_efforts():
    rng = random.Random(0)
    for effort in [i / 1000 for i in range(991)] + [rng.random() * 0.99 for _ in range(2000)]:
        ids = tml.render([{"role": "user", "content": ""}], None, effort)
        text = tml.TOKENIZER.decode(ids[2 : ids.index(200010)])
        assert text == f"Thinking effort level: {effort_text(effort)}", effort


def test_answers_it_accepts_are_read_alike(tokenizer):
    """Turns of random conversations, as an answer: this parser's parts are the package's messages."""
    rng = random.Random(0)
    for _ in range(300):
        messages, _, effort = conversation(rng)
        for turn in (message for message in messages if message["role"] == "assistant"):
            ids = tml.render([turn], None, effort)
            ids = ids[ids.index(200010) + 1 :]  # behind the effort
            parser = InklingParser(special_token_ids=tokenizer.special_token_ids, state=State.OUTSIDE)
            detokenizer = IncrementalDetokenizer(tokenizer, keep=tokenizer.special_token_ids)
            deltas = parser.push_tokens(detokenizer.pieces(ids)) + parser.finish()
            assert summary(deltas) == theirs(tml.parse(ids))


def summary(deltas) -> tuple:
    calls = [(call.name, json.loads(call.arguments)) for call in collect(deltas).tool_calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def theirs(messages) -> tuple:
    reasoning = content = ""
    calls = []
    for message in messages:
        part = message.content
        if isinstance(part, tml.chat.Thinking):
            reasoning += part.text
        elif isinstance(part, tml.chat.Text):
            content += part.text
        elif isinstance(part, tml.chat.InvokeTool):
            calls.append((part.name, {arg.name: json.loads(arg.value) for arg in part.args}))
    return reasoning, content, calls
