"""A part of o200k's vocabulary, at its own ids, in the two forms that Inkling's checkpoints ship."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path

from serve.text.huggingface import character_of_byte
from serve.text.inkling_tokens import control_names
from serve.text.tiktoken_bpe import WORDS

INKLING_VOCABULARY = Path(__file__).parent / "inkling_vocabulary.tiktoken"


def inkling_spec() -> dict:
    """Content of tokenizer.json: byte-level BPE whose merges give the ranks of the tiktoken file."""
    ranks = {}
    for line in INKLING_VOCABULARY.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    spelling = character_of_byte()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges = [_halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__)]
    controls = dict(zip(control_names(), range(199998, 200058), strict=True))
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, "normalized": False, "single_word": False}
            | {"lstrip": False, "rstrip": False}
            for name, i in controls.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()} | controls,
            "merges": [[spelled[a], spelled[b]] for a, b in filter(None, merges)],
        },
    }


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that a longer one is merged from; None for a byte, and for one whose parts are left out here."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, ranks[token]) for a, b in itertools.pairwise(parts)]
        first = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[first] >= ranks[token]:
            return None
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
