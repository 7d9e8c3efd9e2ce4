"""The corpus: seeded, split cleanly, and rendered exactly as the server renders a request."""

import json
from itertools import islice
from random import Random

import pytest

from checkpoints.training.conversation import call_message
from checkpoints.training.corpus import ALL_KINDS, CLOSED, KINDS, draw, draw_turn, held_out, stream
from checkpoints.training.pack import pack, training_batch
from checkpoints.training.render import encode, produced, prompt_text, template
from checkpoints.training.tokenizer import CHECKPOINT, SPECIAL, TAGS, VOCAB_SIZE, load_tokenizer
from serve.text.chat_template import encode_chat
from serve.text.load import load_tokenizer as load_served

EXAMPLES = [json.loads(line) for line in (CHECKPOINT / "examples.jsonl").read_text().splitlines()]


def test_same_seed_same_corpus():
    first, again, other = (list(islice(stream(seed), 200)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    a, b = training_batch(0, 7, 2, 512), training_batch(0, 7, 2, 512)
    assert (a.tokens == b.tokens).all()
    assert (a.produced == b.produced).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CLOSED])
def test_held_out_questions_are_never_trained_on(kind):
    rng = Random(0)
    assert not any(held_out(draw_turn(rng, kind, False).question) for _ in range(50))
    assert all(held_out(draw_turn(rng, kind, True).question) for _ in range(5))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_model_must_produce_exactly_the_completion(kind):
    rng = Random(kind)
    for _ in range(5):
        conversation = draw(rng, kind=kind)
        ids, mask, start = encode(conversation)
        last = [int(token) for token, wanted in zip(ids[start:], mask[start:], strict=True) if wanted]
        assert load_tokenizer().decode(last, skip_special_tokens=False) == conversation.completion()
        assert (produced(ids.tolist()) == mask).all()


def test_completion_is_what_the_template_makes_of_it_afterwards():
    """The turn as trained equals the turn as it appears in the history of the next request."""
    for conversation in islice((c for c in stream(5) if c.enable_thinking), 100):
        if conversation.tool_calls:
            message = call_message(conversation.tool_calls, conversation.reasoning)
        else:
            message = {
                "role": "assistant",
                "content": conversation.content,
                "reasoning_content": conversation.reasoning,
            }
        history = template().render(messages=[*conversation.messages, message], tools=conversation.tools)
        ending = conversation.completion().rsplit("<|", 1)[0]  # without the end marker
        assert history == prompt_text(conversation) + ending


def test_server_sends_the_model_what_it_was_trained_on():
    served = load_served(CHECKPOINT)
    for conversation in islice(stream(6), 60):
        prompt = encode_chat(
            served, conversation.messages, conversation.tools, enable_thinking=conversation.enable_thinking
        )
        ids, _, start = encode(conversation)
        assert prompt == ids[:start].tolist()


def test_packing_keeps_conversations_whole():
    conversations = list(islice(stream(8), 30))
    packed = pack(conversations, 1024)
    rows = {tuple(packed.tokens[row][packed.segments[row] == segment].tolist()) for row, segment in packed.kinds}
    assert rows == {tuple(encode(c)[0].tolist()) for c in conversations}


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two\n\n spaces\t", "你好 🙂 café", "12345 + 6", "get_weather", ""]
)
def test_tokenizer_round_trip(text):
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_layout():
    tokenizer = load_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(len(tokenizer.encode(marker).ids) == 1 for marker in (*SPECIAL, *TAGS))
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    assert special == set(SPECIAL)
    assert len(tokenizer.encode("4821").ids) == 4, "one token a digit"
    inside, alone = tokenizer.encode("in Oslo.").ids, tokenizer.encode("Oslo").ids
    assert inside[2 : 2 + len(alone)] == alone, "a word has the same tokens wherever it stands"


def test_examples_are_current_and_held_out():
    assert len(EXAMPLES) >= 60
    assert sum(not e["enable_thinking"] for e in EXAMPLES) >= 8
    assert max(e["prompt_tokens"] for e in EXAMPLES) > 20 * 33, "some needles are many windows away"
