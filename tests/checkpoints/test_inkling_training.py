"""The tiny Inkling's training pass equals the model, learns, and is written out without loss."""

import dataclasses
from itertools import islice
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modeling
from checkpoints.training.inkling.corpus import draw, stream
from checkpoints.training.inkling.export import read, write_bf16, write_nvfp4, write_settings
from checkpoints.training.inkling.forward import FIRST_PACKED_LAYER, forward, init, is_packed, logits_of, shear
from checkpoints.training.inkling.pack import Packed, pack
from checkpoints.training.inkling.render import encode
from checkpoints.training.inkling.shape import VISION
from checkpoints.training.inkling.shape import config as make_config
from checkpoints.training.inkling.sights import MEDIA_KINDS
from checkpoints.training.inkling.train import Trainer, rows_of
from modeling.inkling.config import FULL, SLIDING, MTPConfig
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import mtp_hidden
from modeling.score import place_media

LENGTH = 384  # more than one block of a full layer
CONFIG = dataclasses.replace(make_config(), log_scaling_n_floor=20)
SMALL = dataclasses.replace(
    CONFIG, num_hidden_layers=2, layer_types=(SLIDING, FULL), sparse_layers=(False, True), num_experts=4,
    num_experts_per_tok=2, mtp=MTPConfig((SLIDING,)),
)  # fmt: skip


@pytest.fixture(scope="module")
def packed() -> Packed:
    rng = Random(11)
    drawn = [draw(rng, kind=kind) for kind in (*MEDIA_KINDS, "tool_call", "multi_turn", "add")]
    drawn += islice((c for c in stream(11) if len(encode(c).ids) < 70 and c.kind not in MEDIA_KINDS), 8)
    result, left = pack([(c.kind, encode(c)) for c in drawn], 4, LENGTH)
    assert not left
    return result


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    """Random parameters in which norms, scales, biases and convolutions matter too."""
    rng = np.random.default_rng(0)
    drawn = {name: np.asarray(value) for name, value in init(CONFIG, VISION, 0).items()}
    return {
        name: value + rng.normal(0, 0.2, value.shape).astype(np.float32)
        if value.ndim == 1 or "sconv" in name or name.endswith(".proj") else value
        for name, value in drawn.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def folders(params, tmp_path_factory):
    bf16, nvfp4 = tmp_path_factory.mktemp("bf16"), tmp_path_factory.mktemp("nvfp4")
    write_bf16(params, bf16)
    write_nvfp4(params, nvfp4, dict.fromkeys(filter(is_packed, params), np.float32(3)))
    for folder in (bf16, nvfp4):
        write_settings(folder)
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"log_scaling_n_floor": 256', '"log_scaling_n_floor": 20'))
    return bf16, nvfp4


def relative(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_forward_equals_the_model_on_exported_weights(folders, packed, form):
    """Export, loader, towers, every depth and the packed pass at once: the float32 logits of each conversation agree.

    So nothing leaks from one conversation of a row into the next.
    """
    folder = folders[form == "nvfp4"]
    model = modeling.load(folder, dtype=jnp.float32, progress=False)
    assert isinstance(model, Inkling)
    assert model.config == CONFIG
    assert [f == "nvfp4" for f in model.expert_formats] == [
        form == "nvfp4" and i >= FIRST_PACKED_LAYER for i in range(7)
    ]
    weights = {name: jnp.asarray(value) for name, value in read(folder).items()}

    @jax.jit
    def run(rows):
        return [logits_of(weights, hidden, CONFIG) for hidden in forward(weights, rows, CONFIG).hidden]

    @jax.jit
    def alone(tokens, embeds, here):
        from modeling.batch import MediaRows

        media = MediaRows(embeds, here)
        hidden = model.hidden(tokens, media)
        return [model.logits(h) for h in (hidden, *mtp_hidden(model, hidden, model.embedded(tokens, media)))]

    found = [np.asarray(x) for x in run(rows_of(packed))]
    kinds = {kind: at for at, kind in packed.last.items() if len(_places(packed, at)) <= 256}
    assert kinds.keys() > set(MEDIA_KINDS)
    for kind in [*MEDIA_KINDS, *(kinds.keys() - MEDIA_KINDS)][:6]:
        row, here = kinds[kind][0], _places(packed, kinds[kind])
        tokens = np.zeros((1, 256), np.int32)
        tokens[0, : len(here)] = packed.tokens[row, here]
        media = place_media(model, tokens, media_of(packed, row * LENGTH + here))
        for n, expected in enumerate(alone(tokens, media.embeds, media.here)):
            count = len(here) - n  # each depth looks one token further
            assert relative(found[n][row, here[:count]], np.asarray(expected)[0, :count]) < 1e-5, (kind, n)


def _places(packed: Packed, at: tuple[int, int, int]) -> np.ndarray:
    row, _, end = at
    return np.flatnonzero(packed.segments[row] == packed.segments[row, end - 1])


def media_of(packed: Packed, places: np.ndarray) -> dict[str, np.ndarray]:
    """The tower rows at these places of the flattened rows, as the scorer takes them."""
    arrays = {}
    if len(patches := np.flatnonzero(np.isin(packed.patch_at, places))):
        arrays["pixel_values"] = packed.patches[patches][:, None].repeat(2, 1).astype(np.float32)
    if len(frames := np.flatnonzero(np.isin(packed.frame_at, places))):
        arrays["audio_input_ids"] = packed.frames[frames][None]
    return arrays


def test_bf16_round_trip(folders, params):
    stored = read(folders[0])
    assert stored.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_allclose(stored[name], value, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("offset, keys", [(0, 5), (3, 8), (9, 14), (2, 7), (6, 20)])
def test_shear_moves_distances_to_keys(offset, keys):
    rel = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)
    expected = np.zeros((2, 5, keys), np.float32)
    for query in range(5):
        for key in range(keys):
            if 0 <= query + offset - key < 7:
                expected[:, query, key] = rel[:, query, query + offset - key]
    np.testing.assert_array_equal(shear(jnp.asarray(rel), offset, keys), expected)


def test_a_few_steps_reduce_every_loss_and_move_the_bias_of_the_router(packed):
    trainer = Trainer(init(SMALL, VISION, 0), SMALL, jnp.float32)
    steps = [trainer.step(packed, 3e-3, quantise=i % 2 == 1) for i in range(12)]
    for name in ("loss0", "loss1"):
        losses = [float(metrics[name]) for metrics in steps]
        assert np.isfinite(losses).all()
        assert losses[-1] < 0.7 * losses[0]
    bias = np.asarray(trainer.params["model.llm.layers.1.mlp.gate.bias"])
    assert 0 < np.abs(bias).max() <= 12 * 3e-3
