"""`python -m modeling.score` on Inkling: reference outputs with media and drafting depths, unusable input."""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from inkling_oracle import Oracle
from tiny import relative
from tiny_inkling import CachedInkling, random_tokens, tiny_inkling

import modeling
from modeling import score as scoring
from modeling.inkling.config import FULL, MTPConfig
from modeling.inkling.model import Inkling
from modeling.parameters import parameter_names
from modeling.score import Media, main, score

FIXTURES = Path(__file__).parents[1] / "fixtures"
MTP = {"inkling-mtp": 4, "inkling-variant": 2}  # depths
NAMES = ("inkling-bf16", "inkling-nvfp4", "inkling-mm-bf16", *MTP)
SHORT: dict[str, Any] = dict(
    num_hidden_layers=2, layer_types=(FULL, FULL), sparse_layers=(False, True), mtp=MTPConfig((FULL,) * 3)
)
MEDIA = ("pixel_values", "audio_input_ids", "audio_input_ids_mask")


@functools.cache
def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def run(tmp_path, name, dtype):
    """What the command writes for a fixture's own input."""
    reference, out = expected(name), tmp_path / "out.npz"
    np.save(tmp_path / "ids.npy", reference["ids"])
    arguments = [FIXTURES / name, "--tokens", tmp_path / "ids.npy", "--dtype", dtype, "--out", out]
    if "pixel_values" in reference:
        np.savez(tmp_path / "media.npz", allow_pickle=False, **{key: reference[key] for key in MEDIA})
        arguments += ["--media", tmp_path / "media.npz"]
    if name in MTP:
        arguments += ["--mtp"]
    assert main([*map(str, arguments)]) == 0
    with np.load(out) as file:
        return dict(file)


def median_row(a, b):
    return float(np.median(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))


@pytest.mark.parametrize("name", NAMES)
def test_command_line_gives_the_reference_logits(name, tmp_path):
    reference, found = expected(name), run(tmp_path, name, "float32")
    assert all(logits.dtype == np.float32 for logits in found.values())
    assert relative(found.pop("logits"), reference["logits_f32"]) <= 1e-5
    assert sorted(found) == [f"mtp_logits_{n}" for n in range(MTP.get(name, 0))]
    for key, logits in found.items():
        truth = reference[key.replace("logits_", "logits_f32_")]
        assert logits.shape == truth.shape
        assert relative(logits, truth) <= 1e-5


@pytest.mark.parametrize("name", ["inkling-bf16", "inkling-mm-bf16", "inkling-variant"])
def test_bfloat16_is_no_farther_from_the_truth_than_the_reference(name, tmp_path):
    reference = expected(name)
    truth = reference["logits_f32"]
    ours, theirs = (
        median_row(logits, truth) for logits in (run(tmp_path, name, "bfloat16")["logits"], reference["logits_bf16"])
    )
    assert ours <= 1.25 * theirs


def test_greedy_continuation_through_the_cache_is_the_references():
    reference = expected("inkling-bf16")
    model = modeling.load(FIXTURES / "inkling-bf16", dtype="float32", progress=False)
    assert isinstance(model, Inkling)
    cached = CachedInkling(model, 1, 64, max_chunk=8)  # answers are padded to the prompt's chunks: one program
    prompt = reference["ids"][:1, :24].astype(np.int32)
    answer = [int(cached.in_chunks(prompt, [8] * 3)[0, -1].argmax())]
    while len(answer) < 40:
        step = np.full((1, 8), answer[-1], np.int32)
        answer.append(int(cached(step, [1])[0, 0].argmax()))
    assert answer == reference["greedy"].tolist()


def test_chunks_do_not_matter_to_media_and_depths(monkeypatch):
    """Media that cross a chunk's end, and depths that look past it."""
    monkeypatch.setattr(scoring, "CHUNK_TOKENS", 48)
    model = tiny_inkling(**SHORT)
    tokens = random_tokens(model, 2, 70)
    embeds = np.random.default_rng(1).standard_normal((2, 70, model.config.hidden_size)).astype(np.float32)
    here = (np.arange(70) > 40) & (np.arange(70) < 60) & np.array([[True], [False]])
    found = score(model, tokens, Media(embeds, here), mtp=True)
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    oracle = Oracle(model.config, {name: np.asarray(leaf, np.float64) for name, leaf in leaves}, rounding=False)
    for row in range(2):
        media = dict(zip(np.flatnonzero(here[row]), embeds[row][here[row]], strict=True))
        hidden = oracle.hidden(tokens[row], media)
        truth = [hidden, *oracle.depths(hidden, oracle.embedded(tokens[row], media))]
        for got, want in zip([found.logits, *found.mtp_logits], truth, strict=True):
            assert relative(got[row], oracle.logits(want)) <= 1e-5


def test_depths_have_no_rows_where_there_is_nothing_to_predict():
    one_layer: dict[str, Any] = SHORT | dict(num_hidden_layers=1, layer_types=(FULL,), sparse_layers=(False,))
    model = tiny_inkling(**one_layer)
    assert [x.shape[1] for x in score(model, random_tokens(model, 1, 2), mtp=True).mtp_logits] == [1, 0, 0]


def changed(**changes):
    """The media fixture's media with some arrays exchanged; None leaves one out."""
    arrays = {key: expected("inkling-mm-bf16")[key] for key in MEDIA} | changes
    return {key: value for key, value in arrays.items() if value is not None}


@pytest.mark.parametrize(
    "name, media, words",
    [
        ("inkling-bf16", None, "no multi-token prediction; leave --mtp out"),
        ("inkling-bf16", {}, "no image tower"),
        ("inkling-bf16", {"pixel_values": None}, "no audio tower"),
        ("inkling-mm-bf16", {"pixel_values": np.zeros((5, 2, 8, 8, 3))}, "6 image placeholders in --tokens, but 5"),
        ("inkling-mm-bf16", {"pixel_values": np.zeros((7, 2, 8, 8, 3))}, "6 image placeholders in --tokens, but 7"),
        ("inkling-mm-bf16", {"pixel_values": None}, "6 image placeholders in --tokens, but 0"),
        ("inkling-mm-bf16", {"audio_input_ids": None}, "9 audio placeholders in --tokens, but 0"),
        (
            "inkling-mm-bf16",
            {"audio_input_ids_mask": np.arange(9)[None] > 0},
            "9 audio placeholders in --tokens, but 8",
        ),
        ("inkling-mm-bf16", {"audio_input_ids_mask": np.ones((1, 8))}, "audio_input_ids_mask must be [1, 9]"),
        ("inkling-mm-bf16", {"pixel_values": np.zeros((6, 2, 4, 4, 3))}, "must be [2, 8, 8, 3], not [2, 4, 4, 3]"),
        ("inkling-mm-bf16", {"audio_input_ids": np.zeros((1, 9, 81), int)}, "must be [80], not [81]"),
        ("inkling-mm-bf16", {"audio_input_ids": np.full((1, 9, 80), 16)}, "must be in 0..15"),
        ("inkling-mm-bf16", {"audio_input_ids": np.full((1, 9, 80), -1)}, "must be in 0..15"),
        ("inkling-mm-bf16", {"audio_input_ids": np.full((1, 9, 80), np.nan)}, "must be in 0..15"),
        ("inkling-mm-bf16", {"audio_input_ids": np.full((1, 9, 80), 2.5)}, "must be in 0..15"),
        ("inkling-mm-bf16", {"pixel_values": np.full((6, 2, 8, 8, 3), np.inf)}, "finite float32 numbers"),
        ("inkling-mm-bf16", {"pixel_values": np.full((6, 2, 8, 8, 3), 1e300)}, "finite float32 numbers"),
        ("inkling-mm-bf16", {"pixel_values": np.full((6, 2, 8, 8, 3), "1")}, "pixel_values in"),
        ("inkling-mm-bf16", {"pixel_values": np.ones((6, 2, 8, 8, 3), complex)}, "must be an array of numbers"),
        ("inkling-mm-bf16", None, "give what they stand for with --media"),
    ],
)
def test_im09_what_does_not_fit_is_one_sentence_and_exit_code_2(name, media, words, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", expected("inkling-mm-bf16")["ids"])
    arguments = [str(FIXTURES / name), "--tokens", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz")]
    if media is None:
        arguments += ["--mtp"] if name == "inkling-bf16" else []
    else:
        np.savez(tmp_path / "media.npz", allow_pickle=False, **changed(**media))
        arguments += ["--media", str(tmp_path / "media.npz")]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize("save", [np.save, lambda path, array: path.write_bytes(b"PK"), lambda path, array: None])
def test_media_of_another_format_are_one_sentence_and_exit_code_2(save, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.zeros((1, 4), int))
    save(tmp_path / "media.npy", np.zeros((6, 2, 8, 8, 3)))
    arguments = ["--tokens", "ids.npy", "--media", "media.npy", "--out", "out.npz"]
    paths = [argument if argument.startswith("--") else str(tmp_path / argument) for argument in arguments]
    assert main([str(FIXTURES / "inkling-mm-bf16"), *paths]) == 2
    assert "is not an .npz of arrays" in capsys.readouterr().err


def damaged(content: bytes, seed: int) -> bytes:
    """Some bytes changed, and for odd seeds the rest cut off."""
    rng = np.random.default_rng(seed)
    data = np.frombuffer(content, np.uint8).copy()[: rng.integers(1, len(content)) if seed % 2 else None]
    data[rng.integers(0, min(len(data), 150), 4)] = rng.integers(0, 256, 4)
    return data.tobytes()


@pytest.mark.parametrize("save", [np.save, lambda file, ids: np.savez_compressed(file, pixel_values=ids)])
def test_damaged_arrays_are_one_sentence(save, tmp_path):
    """Readers of the formats raise errors of Python's tokenizer, of zlib and of zip among others."""
    save(file := io.BytesIO(), np.random.default_rng(0).integers(0, 9, (4, 50)))
    read = scoring.read_tokens if save is np.save else scoring.read_media
    refused = 0
    for seed in range(300):
        (tmp_path / "damaged").write_bytes(damaged(file.getvalue(), seed))
        try:
            read(tmp_path / "damaged")
        except ValueError as error:
            refused += "damaged" in str(error)
    assert refused > 200


def test_a_member_that_is_no_array_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "media.npz", "w") as file:
        file.writestr("pixel_values", b"no array")
    with pytest.raises(ValueError, match="must be an array of numbers"):
        scoring.read_media(tmp_path / "media.npz")


def test_padding_frames_between_clips_take_no_placeholder():
    """Two clips of different lengths: their real frames fill the placeholders in order."""
    reference = expected("inkling-mm-bf16")
    model = modeling.load(FIXTURES / "inkling-mm-bf16", dtype="float32", progress=False)
    frames = reference["audio_input_ids"][0]
    clips, mask = np.zeros((2, 6, 80), int), np.zeros((2, 6), int)
    clips[0, :3], clips[1, :], mask[0, :3], mask[1] = frames[:3], frames[3:], 1, 1
    media = {"pixel_values": reference["pixel_values"]}
    one = scoring.place_media(model, reference["ids"], media | {"audio_input_ids": frames[None]})
    two = scoring.place_media(model, reference["ids"], media | {"audio_input_ids": clips, "audio_input_ids_mask": mask})
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert one.here.sum() == 15
