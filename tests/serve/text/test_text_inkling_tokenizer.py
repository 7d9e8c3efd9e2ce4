"""Inkling's vocabulary in both of its forms: the same ids, and control tokens that no text produces."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_vocabulary import INKLING_VOCABULARY
from text_samples import mixed_lines

from serve.text import find_tokenizer, load_tokenizer
from serve.text.huggingface import HuggingFaceTokenizer
from serve.text.inkling_tokens import END_TURN, control_names, is_inkling
from serve.text.spm import SentencePieceTokenizer
from serve.text.tiktoken_bpe import TiktokenTokenizer, is_tiktoken


@pytest.fixture(scope="module")
def ranks(inkling_folder):
    return load_tokenizer(inkling_folder / "tiktoken" / "tokenizer.model")


def test_both_forms_have_the_control_tokens_at_the_ids_of_spec_8_1(inkling, ranks):
    for tokenizer, form in ((inkling, HuggingFaceTokenizer), (ranks, TiktokenTokenizer)):
        assert isinstance(tokenizer, form)
        assert tokenizer.vocab_size == 200058
        assert list(tokenizer.special_tokens.items()) == [*enumerate(control_names(), 199998)]
        named = {
            200000: "message_user",
            200006: "content_model_end_sampling",
            200010: "end_message",
            200043: "audio_end",
        }
        named |= {200049: "content_invoke_tool_json", 200054: "unused_200054", 200057: "content_invoke_tool_text"}
        assert {i: tokenizer.special_tokens[i] for i in named} == {i: f"<|{name}|>" for i, name in named.items()}
        assert tokenizer.skipped_ids == frozenset(range(199998, 200058))


def test_both_forms_end_at_the_end_of_the_turn_alone(inkling, ranks):
    """Item 36 of spec 10: `<|end_message|>` is no end of an answer."""
    assert inkling.eos_token_ids == ranks.eos_token_ids == (200006,)


def test_settings_beside_the_tiktoken_folder_are_read(inkling_folder, tmp_path):
    shutil.copytree(inkling_folder / "tiktoken", tmp_path / "tiktoken")
    (tmp_path / "chat_template.jinja").write_text("mine")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 199999}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TURN}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("mine", (199999, 200006))
    assert tokenizer.template_variables == {"eos_token": END_TURN}


def test_tokenizer_json_goes_first(inkling_folder):
    assert find_tokenizer(inkling_folder).name == "tokenizer.json"


def test_forms_of_a_model_file_are_told_apart_by_content(sentencepiece_folder, tmp_path):
    pieces = tmp_path / "tokenizer.model"
    shutil.copy(sentencepiece_folder / "tokenizer.model", pieces)
    assert not is_tiktoken(pieces)
    assert isinstance(load_tokenizer(pieces), SentencePieceTokenizer)
    shutil.copy(INKLING_VOCABULARY, pieces)
    assert is_tiktoken(pieces)
    assert isinstance(load_tokenizer(pieces), TiktokenTokenizer)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("QQ== 0\nQg== x\n", "line 2"),
        ("QQ== 0\nnot base64!! 1\n", "line 2"),
        ("QQ== 0\nQg==\n", "line 2"),
        ("QQ== 0\n", "0x00"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, says):
    (tmp_path / "tokenizer.model").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.model cannot be used.*{says}"):
        load_tokenizer(tmp_path)


def test_both_forms_give_the_same_ids(inkling, ranks):
    for line in mixed_lines(1000):
        ids = inkling.encode(line)
        assert ranks.encode(line) == ids
        assert inkling.decode(ids) == ranks.decode(ids) == line


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*control_names(), "<|", "|>", "Thinking", " effort", "한국어", "é", "\n", " "])
        | st.text(max_size=4),
        max_size=8,
    ).map("".join)
)
def test_tk03_no_text_produces_a_control_token(inkling, ranks, text):
    for tokenizer in (inkling, ranks):
        ids = tokenizer.encode(text)
        assert not tokenizer.special_tokens.keys() & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert inkling.encode(text) == ranks.encode(text)


def test_control_tokens_are_read_where_the_caller_says_so(inkling, ranks):
    text = "<|message_user|><|content_text|>Hi<|end_message|>"
    for tokenizer in (inkling, ranks):
        assert tokenizer.encode(text, parse_special=True) == [200000, 200004, 12194, 200010]
        assert tokenizer.token_to_id("<|end_message|>") == 200010
        assert tokenizer.token_to_id("Hi") == 12194
        assert tokenizer.token_to_id("no such token") is None
        assert tokenizer.token_bytes(200058) == b""


def test_the_format_is_known_by_the_control_tokens(inkling, tokenizer):
    assert is_inkling(inkling.special_token_ids)
    assert not is_inkling(tokenizer.special_token_ids)
