"""`python -m modeling.score`: reference outputs, long rows, unusable input."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense_logits, random_tokens, relative, tiny_flint

import modeling
from modeling import score as scoring
from modeling.score import main, score

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("flint-bf16", "flint-nvfp4-gguf")


def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def run(tmp_path, *arguments):
    out = tmp_path / "out.npz"
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    with np.load(out) as file:
        return file["logits"]


def median_row(a, b):
    return float(np.median(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))


@pytest.mark.parametrize("name", NAMES)
def test_command_line_gives_the_reference_logits(name, tmp_path):
    reference = expected(name)
    np.save(tmp_path / "ids.npy", reference["ids"])
    logits = run(tmp_path, FIXTURES / name, "--tokens", tmp_path / "ids.npy", "--dtype", "float32")
    assert logits.dtype == np.float32
    assert relative(logits, reference["logits_f32"]) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_no_farther_from_the_truth_than_the_reference(name):
    reference = expected(name)
    model = modeling.load(FIXTURES / name, dtype="bfloat16", progress=False)
    truth = reference["logits_f32"]
    assert median_row(score(model, reference["ids"]).logits, truth) <= 1.25 * median_row(
        reference["logits_bf16"], truth
    )


def test_greedy_continuation_is_the_references():
    reference = expected("flint-bf16")
    model = modeling.load(FIXTURES / "flint-bf16", dtype="float32", progress=False)
    tokens = reference["ids"][:1, :24].astype(np.int32)
    for want in reference["greedy"]:
        padded = np.zeros((1, 64), np.int32)
        padded[:, : tokens.shape[1]] = tokens
        got = int(score(model, padded).logits[0, tokens.shape[1] - 1].argmax())
        assert got == want
        tokens = np.append(tokens, [[got]], axis=1)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (2, 300)])
def test_chunks_and_row_groups_do_not_matter(shape, monkeypatch):
    model = tiny_flint()
    tokens = random_tokens(model, *shape)
    truth = dense_logits(model, tokens)
    for chunk_tokens in (512, 128):
        monkeypatch.setattr(scoring, "CHUNK_TOKENS", chunk_tokens)
        assert relative(score(model, tokens).logits, truth) <= 1e-5


def test_router_dtype_can_be_chosen(tmp_path):
    reference = expected("flint-bf16")
    exact, rounded = (
        modeling.load(FIXTURES / "flint-bf16", dtype="bfloat16", router_dtype=d, progress=False)
        for d in ("float32", "bfloat16")
    )
    assert exact.layers[2].mlp.gate[...].dtype == jnp.float32
    assert rounded.layers[2].mlp.gate[...].dtype == jnp.bfloat16
    a, b = (score(model, reference["ids"][:1, :32]).logits for model in (exact, rounded))
    assert relative(a, b) > 1e-3


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{fixture}", "--tokens", "{tmp}/absent.npy"], "does not exist"),
        (["{tmp}/no-such-model", "--tokens", "{good}"], "no-such-model"),
        (["{fixture}", "--tokens", "{text}"], "not a .npy"),
        (["{fixture}", "--tokens", "{floats}"], "integer token ids"),
        (["{fixture}", "--tokens", "{empty}"], "no tokens"),
        (["{fixture}", "--tokens", "{large}"], "0..511"),
        (["{fixture}", "--tokens", "{negative}"], "0..511"),
        (["{fixture}", "--tokens", "{long}"], "context of 4096"),
        (["{fixture}", "--tokens", "{good}", "--mtp"], "no multi-token prediction"),
        (["{fixture}", "--tokens", "{good}", "--media", "{media}"], "no media"),
    ],
)
def test_unusable_input_is_one_sentence_and_exit_code_2(arguments, words, tmp_path, capsys):
    arrays = dict(
        good=np.zeros((1, 4), np.int64),
        floats=np.zeros((1, 4)),
        empty=np.zeros((1, 0), int),
        large=np.full((1, 4), 512),
        negative=np.full((1, 4), -1),
        long=np.zeros((1, 4097), int),
    )
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "text.npy").write_text("not an array")
    np.savez(tmp_path / "media.npz", pixel_values=np.zeros((1, 2, 8, 8, 3)))
    places = {name: tmp_path / f"{name}.npy" for name in [*arrays, "text"]} | {"media": tmp_path / "media.npz"}
    places |= {"tmp": tmp_path, "fixture": FIXTURES / "flint-bf16"}
    code = main([a.format(**places) for a in arguments] + ["--out", str(tmp_path / "out.npz")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert error.startswith("error: ")
    assert words in error
