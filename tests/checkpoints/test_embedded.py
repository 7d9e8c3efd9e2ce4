"""The committed checkpoints answer their examples, by greedy decoding, to the last token."""

import json

import jax
import numpy as np
import pytest

import modeling
from checkpoints.training.conversation import call_text
from checkpoints.training.export import NVFP4_FOLDER, read_gguf, read_safetensors
from checkpoints.training.forward import is_quantised
from checkpoints.training.nvfp4 import dequantize, quantize
from checkpoints.training.tokenizer import CHECKPOINT, END
from serve.text.chat_template import encode_chat
from serve.text.load import load_tokenizer

EXAMPLES = [json.loads(line) for line in (CHECKPOINT / "examples.jsonl").read_text().splitlines()]


def sequence(tokenizer, example) -> tuple[list[int], int]:
    """Token ids of an example's prompt and answer, and the prompt's length."""
    prompt = encode_chat(
        tokenizer, example["messages"], example.get("tools"), enable_thinking=example["enable_thinking"]
    )
    calls = "".join(call_text(call["name"], call["arguments"]) for call in example["tool_calls"])
    thought = f"{example['reasoning']}</think>" if example["enable_thinking"] else ""
    answer = thought + example["content"] + calls + ("<|observation|>" if calls else "<|user|>")
    return prompt + tokenizer.encode(answer, parse_special=True), len(prompt)


@pytest.mark.parametrize("folder", [CHECKPOINT, NVFP4_FOLDER], ids=["bf16", "nvfp4"])
def test_examples_are_answered_exactly(folder):
    """An answer is what greedy decoding gives if every one of its tokens is the first choice after those before it.

    The short examples and three long ones, in float32, which is fast on a CPU; the server's tests ask the rest.
    """
    model, tokenizer = modeling.load(folder, dtype=np.float32, progress=False), load_tokenizer(folder)
    assert set(tokenizer.eos_token_ids) == {tokenizer.token_to_id(text) for text in END}
    choose = jax.jit(lambda tokens: model(tokens).argmax(-1))
    wrong = []
    sequences = [(example["kind"], *sequence(tokenizer, example)) for example in EXAMPLES]
    short = [s for s in sequences if len(s[1]) <= 64]
    long = [next(s for s in sequences if s[0] == kind) for kind in ("tool_call int", "tool_response", "needle 600")]
    for group, high in ((short, 64), (long, 640)):
        tokens = np.array([ids + [0] * (high - len(ids)) for _, ids, _ in group], np.int32)
        chosen = np.asarray(choose(tokens))
        for (kind, ids, start), choices in zip(group, chosen, strict=True):
            if choices[start - 1 : len(ids) - 1].tolist() != ids[start:]:
                wrong.append((kind, tokenizer.decode(ids, skip_special_tokens=False)))
    assert not wrong


def test_nvfp4_checkpoint_is_quantised_from_the_bf16_one():
    bf16, nvfp4 = read_safetensors(CHECKPOINT), read_gguf(NVFP4_FOLDER)
    assert bf16.keys() == nvfp4.keys()
    for name, value in bf16.items():
        expected = dequantize(*quantize(value)) if is_quantised(name) else value
        np.testing.assert_array_equal(nvfp4[name], expected)


def test_files_stay_small():
    for folder in (CHECKPOINT, NVFP4_FOLDER):
        assert all(file.stat().st_size < 6_000_000 for file in folder.iterdir())
