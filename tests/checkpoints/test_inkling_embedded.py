"""The committed tiny Inklings answer their examples through the engine, pictures and tones too, and draft well."""

import functools
import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from checkpoints.training.inkling.engine import as_request, read_examples
from checkpoints.training.inkling.export import NVFP4_FOLDER, TEMPLATE, read
from checkpoints.training.inkling.forward import is_packed
from checkpoints.training.inkling.samples import FOLDER, samples
from checkpoints.training.inkling.tokenizer import CHECKPOINT
from checkpoints.training.nvfp4 import dequantize, quantize
from serve.assemble import assemble
from serve.request import Completion

FOLDERS = {"bf16": CHECKPOINT, "nvfp4": NVFP4_FOLDER}
EXAMPLES = read_examples()
MEDIA = {".png": "image", ".wav": "audio"}


def asked(file: str, question: str, content: str, reasoning: str | None = None) -> dict:
    """A question about a sample file, like a line of the examples."""
    kind = MEDIA[Path(file).suffix]
    parts = [{"type": kind, kind: FOLDER / file}, {"type": "text", "text": question}]
    line = {"kind": file, "messages": [{"role": "user", "content": parts}], "content": content, "tool_calls": []}
    return line | {"reasoning": reasoning, "reasoning_effort": "high" if reasoning else "none"}


ABOUT_SAMPLES = [
    asked("purple-ring-on-white.png", "What colour is the shape?", "purple", "I see a purple ring on white."),
    asked("purple-ring-on-white.png", "Which shape is this?", "ring"),
    asked("blue-cross-on-black.png", "Describe the picture.", "A blue cross.", "I see a blue cross on black."),
    asked("blue-cross-on-black.png", "What colour is the background?", "black"),
    asked("f-sharp.wav", "Which note is this?", "F sharp", "I hear F sharp."),
]


ASKED = [*EXAMPLES, *ABOUT_SAMPLES]
WITHOUT_DRAFTS = ASKED[::3]  # still of every sort, in a third of the time
ASKED_OF = {"bf16": ASKED, "nvfp4": ASKED[::2]}


@functools.cache
def answers(form: str, drafts: int | None = None) -> list[tuple[str, Completion, tuple[int, ...]]]:
    """Of one engine, started once: each question's kind, its answer, and the wanted tokens."""
    options = dict(num_slots=4, prefill_chunks=(64,), max_model_len=960, num_draft_tokens=drafts, progress=False)
    assembled = assemble(str(FOLDERS[form]), **options)
    asked = ASKED_OF[form] if drafts is None else WITHOUT_DRAFTS
    with assembled.engine as engine:
        pairs = [as_request(assembled, str(i), example) for i, example in enumerate(asked)]
        done = {one.request_id: one for one in engine.generate(request for request, _ in pairs)}
        assert engine.compiles_since_ready == 0
    return [
        (example["kind"], done[request.request_id], wanted)
        for example, (request, wanted) in zip(asked, pairs, strict=True)
    ]


def test_examples_cover_what_the_checkpoint_is_for():
    kinds = [example["kind"] for example in EXAMPLES]
    assert len(set(kinds)) >= 50
    assert min(kinds.count(kind) for kind in ("picture", "tone")) >= 8
    assert kinds.count("picture_and_tone") >= 4
    assert sum(bool(example["tool_calls"]) for example in EXAMPLES) >= 6
    assert sum(example["reasoning_effort"] == "none" for example in EXAMPLES) >= 16
    assert max(example["prompt_tokens"] for example in EXAMPLES) > 15 * 32, "a needle many windows away"
    assert {"picture", "tone", "picture_and_tone"} <= {example["kind"] for example in WITHOUT_DRAFTS}
    assert any(example["tool_calls"] for example in WITHOUT_DRAFTS)
    assert any(example["reasoning_effort"] == "none" for example in WITHOUT_DRAFTS)


@pytest.mark.parametrize("form", FOLDERS)
def test_examples_and_samples_are_answered_exactly(form):
    """Media as chat clients send them and from files, tools, thinking and none; to the last token."""
    assert [kind for kind, done, wanted in answers(form) if done.token_ids != wanted] == []


@pytest.mark.parametrize("form", FOLDERS)
def test_drafts_of_its_own_text_are_accepted(form):
    """More than two tokens a step were promised; it was trained for more than four."""
    counts = [done.speculation for _, done, _ in answers(form)]
    steps, accepted = (sum(getattr(c, name) for c in counts) for name in ("num_steps", "num_accepted_tokens"))
    assert 1 + accepted / steps > 4
    deepest = sum(c.accepted_by_depth[3] for c in counts if c.num_steps)
    assert deepest > 0.7 * steps


def test_tokens_with_speculation_are_those_without():
    without = [done for _, done, _ in answers("bf16", drafts=0)]
    assert all(done.speculation.num_draft_tokens == 0 for done in without)
    assert [done.token_ids for _, done, _ in answers("bf16")[::3]] == [done.token_ids for done in without]


def test_samples_are_what_the_command_writes():
    """By their pixels: packing them is the library's business."""
    written = samples()
    assert {file.name for file in FOLDER.iterdir()} == written.keys()
    for name, content in written.items():
        if name.endswith(".wav"):
            assert (FOLDER / name).read_bytes() == content
        else:
            committed, fresh = (np.asarray(PIL.Image.open(file)) for file in (FOLDER / name, io.BytesIO(content)))
            np.testing.assert_array_equal(committed, fresh)


def test_nvfp4_checkpoint_is_quantised_from_the_bf16_one():
    bf16, nvfp4 = read(CHECKPOINT), read(NVFP4_FOLDER)
    assert bf16.keys() == nvfp4.keys()
    for name, value in bf16.items():
        expected = dequantize(*quantize(value)) if is_packed(name) else value
        np.testing.assert_array_equal(nvfp4[name], expected)


@pytest.mark.parametrize("form", FOLDERS)
def test_template_is_the_one_written_for_it(form):
    assert (FOLDERS[form] / "chat_template.jinja").read_text() == TEMPLATE.read_text()
    assert (FOLDERS[form] / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", FOLDERS)
def test_files_stay_small(form):
    assert sum(file.stat().st_size for file in FOLDERS[form].rglob("*")) < 7_000_000
