"""A checkpoint folder as smg expects of Inkling, without weights: config, chat template, bytes as the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from serve.media.format import MediaFormat
from serve.text import inkling_tokens as tokens

TEMPLATE = Path(__file__).parents[3] / "checkpoints" / "training" / "inkling" / "chat_template.jinja"


def write_inkling(folder: Path) -> tuple[MediaFormat, int]:
    """Writes the files; returns what the model reads, and its end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in tokens.control_names()])
    tokenizer.save(str(folder / "tokenizer.json"))
    image, audio = (tokenizer.token_to_id(tokens.PLACEHOLDERS[kind]) for kind in ("image", "audio"))
    end = tokenizer.token_to_id(tokens.END_TURN)
    config = {
        "model_type": "inkling_mm_model",
        "architectures": ["InklingForConditionalGeneration"],
        "eos_token_id": end,
        "image_token_id": image,
        "audio_token_id": audio,
        # smg takes a tower for present that has a width.
        "vision_config": {"decoder_dmodel": 64, "patch_size": 40, "temporal_patch_size": 2},
        "audio_config": {"decoder_dmodel": 64, "n_mel_bins": 80, "mel_vocab_size": 16},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return MediaFormat(image_token_id=image, audio_token_id=audio), end
