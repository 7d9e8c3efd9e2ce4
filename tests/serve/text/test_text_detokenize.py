"""Streaming detokenisation equals the one-shot decode and never shows half a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import mixed_lines

from serve.text import IncrementalDetokenizer, load_tokenizer

FORMS = ["bpe_folder", "bpe_gguf", "sentencepiece_folder", "sentencepiece_gguf"]
SAMPLE = "한국어 문장 👩‍🚀 ñ"


@pytest.fixture(scope="module", params=FORMS)
def any_tokenizer(request):
    return load_tokenizer(request.getfixturevalue(request.param))


def streamed(tokenizer, ids, size=1, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)] + [detokenizer.flush()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_tk09_streaming_equals_one_shot(any_tokenizer, size):
    ids = any_tokenizer.encode(SAMPLE)
    texts = streamed(any_tokenizer, ids, size)
    assert "".join(texts) == any_tokenizer.decode(ids) == SAMPLE
    assert not any("\ufffd" in text for text in texts)


def test_tk09_interleaved_streams_do_not_disturb_each_other(any_tokenizer):
    lines = [SAMPLE, *mixed_lines(7, seed=5, controls=False)]
    ids = [any_tokenizer.encode(line) for line in lines]
    detokenizers = [IncrementalDetokenizer(any_tokenizer) for _ in lines]
    texts = ["" for _ in lines]
    for step in range(max(map(len, ids))):
        for row, detokenizer in enumerate(detokenizers):
            texts[row] += detokenizer.push(ids[row][step : step + 1])
    assert [text + d.flush() for text, d in zip(texts, detokenizers, strict=True)] == lines


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_at_all(any_tokenizer, skip):
    """Random ids: broken characters, control tokens in the middle of one, ids outside the vocabulary."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(any_tokenizer.vocab_size + 3) for _ in range(rng.randint(0, 20))]
        texts = streamed(any_tokenizer, ids, rng.randint(1, 4), skip_special_tokens=skip)
        assert "".join(texts) == any_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=30), size=st.integers(1, 5))
def test_any_text(tokenizer, text, size):
    ids = tokenizer.encode(text)
    texts = streamed(tokenizer, ids, size)
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts if "\ufffd" not in text)


def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    assert streamed(tokenizer, tokenizer.encode("fox"))[-1] == ""
    detokenizer = IncrementalDetokenizer(tokenizer)
    euro = [tokenizer.token_to_id(character) for character in ("â", "Ĥ", "¬")]  # the three bytes of the euro sign
    assert [detokenizer.push([i]) for i in euro] == ["", "", "€"]


def test_an_unfinished_character_is_shown_only_at_the_end(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([tokenizer.token_to_id("â")]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_are_skipped_but_those_to_keep(tokenizer):
    ids = tokenizer.encode("<|user|>a<think>b<|endoftext|>", parse_special=True)
    assert "".join(streamed(tokenizer, ids)) == "a<think>b"
    assert "".join(streamed(tokenizer, ids, keep={"<|user|>"})) == "<|user|>a<think>b"
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)) == "<|user|>a<think>b<|endoftext|>"


def test_pieces_name_the_token_and_keep_control_tokens_apart(tokenizer):
    think = tokenizer.token_to_id("<think>")
    half = tokenizer.token_to_id("â")
    fox = tokenizer.encode("fox")
    pieces = IncrementalDetokenizer(tokenizer).pieces([*fox, half, think, *fox])
    assert (half, "\ufffd") in pieces
    assert (think, "<think>") in pieces
    assert "".join(text for _, text in pieces) == "fox\ufffd<think>fox"


def test_each_token_is_looked_at_once(tokenizer, monkeypatch):
    """Unfinished characters for ever: a decoder that looks back to the last certain character would be quadratic."""
    looked_at = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: looked_at.append(token_id) or token_bytes(token_id))
    half = tokenizer.token_to_id("â")
    assert streamed(tokenizer, [half] * 1000) == ["", *["\ufffd"] * 1000]
    assert len(looked_at) == 1000
