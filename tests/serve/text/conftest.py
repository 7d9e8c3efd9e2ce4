"""Small tokenizers in every form, made on the spot, and text to try them on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from inkling_vocabulary import INKLING_VOCABULARY, inkling_spec
from sentencepiece import sentencepiece_model_pb2
from text_samples import SPECIAL, TAGS, TEMPLATE, WORD_RULE, bpe_as_gguf, mixed_lines, write_gguf_vocabulary
from tokenizers import decoders, models, pre_tokenizers, trainers

from serve.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def lines() -> list[str]:
    return mixed_lines(1000)


@pytest.fixture(scope="session")
def bpe_spec() -> dict:
    """Content of a small tokenizer.json in the manner of GLM-4: byte-level BPE with control tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORD_RULE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(mixed_lines(300, seed=1, controls=False), trainer)
    tokenizer.add_special_tokens(SPECIAL)
    # One plain addition before the tags and one behind: removing a tag must not move their ids.
    tokenizer.add_tokens([tokenizers.AddedToken("    ", normalized=False)])
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([tokenizers.AddedToken("lazy dogs", normalized=False)])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="session")
def bpe_folder(bpe_spec, tmp_path_factory) -> Path:
    """A folder as checkpoints ship it: tokenizer.json, settings, chat template, three end ids."""
    folder = tmp_path_factory.mktemp("bpe")
    ids = {token["content"]: token["id"] for token in bpe_spec["added_tokens"]}
    eos = [ids[text] for text in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (folder / "tokenizer.json").write_text(json.dumps(bpe_spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": "old"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos, "temperature": 1.0, "top_p": 0.95, "top_k": 20})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(bpe_folder) -> Tokenizer:
    return load_tokenizer(bpe_folder)


@pytest.fixture(scope="session")
def bpe_gguf(bpe_spec, tmp_path_factory) -> Path:
    return bpe_as_gguf(bpe_spec, tmp_path_factory.mktemp("gguf") / "model.gguf", "glm4")


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory) -> Path:
    """A small SentencePiece BPE model with byte fallback, control and user-defined symbols."""
    folder = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(line.split()) for line in mixed_lines(300, seed=1, controls=False)),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=SPECIAL,
        user_defined_symbols=TAGS,
        character_coverage=0.98,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_gguf(sentencepiece_folder) -> Path:
    """The same SentencePiece model as GGUF metadata."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((sentencepiece_folder / "tokenizer.model").read_bytes())
    file = sentencepiece_folder.parent / "spm.gguf"
    pieces = [piece.piece for piece in model.pieces]
    return write_gguf_vocabulary(
        file, "llama", pieces, [p.type for p in model.pieces], scores=[p.score for p in model.pieces]
    )


@pytest.fixture(scope="session")
def inkling_folder(tmp_path_factory) -> Path:
    """A folder as Inkling's checkpoints ship it, without a chat template: the part of o200k that the tests need."""
    folder = tmp_path_factory.mktemp("inkling")
    (folder / "tokenizer.json").write_text(json.dumps(inkling_spec()))
    (folder / "tiktoken").mkdir()
    shutil.copy(INKLING_VOCABULARY, folder / "tiktoken" / "tokenizer.model")
    return folder


@pytest.fixture(scope="session")
def inkling(inkling_folder) -> Tokenizer:
    return load_tokenizer(inkling_folder)
