"""Which way decode steps run: what is taken where, and what is said about it."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_config
from tiny_inkling import tiny_inkling_config

from modeling.flint.config import FlintConfig
from modeling.flint.decode import Kernels
from modeling.flint.model import Flint
from modeling.inkling.model import Inkling
from modeling.kernels import KernelsError, choose_kernels, with_kernels


def gpu(kind: str, capability: str):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = gpu("NVIDIA H200", "9.0")
INKLING = Inkling.abstract(tiny_inkling_config())
FULL_SIZE = Flint.abstract(FlintConfig(), weight_format="nvfp4")


def flint(dtype=jnp.bfloat16, weight_format="bf16", **changes) -> Flint:
    return Flint.abstract(tiny_config(**changes), dtype=dtype, weight_format=weight_format)


@pytest.mark.parametrize("model", [FULL_SIZE, Flint.abstract(FlintConfig()), flint(), flint(weight_format="nvfp4")])
@pytest.mark.parametrize(
    "rows, device",
    [(1, H200), (8, H200), (1, gpu("NVIDIA GB200", "10.0")), (3, gpu("NVIDIA RTX 5090", "12.0"))],
)
@pytest.mark.parametrize("requested", ["auto", "pallas"])
def test_kernels_are_taken_where_they_can_run(model, rows, device, requested, caplog):
    caplog.set_level(logging.INFO)
    assert choose_kernels(model, requested, rows, device) == Kernels()
    assert caplog.messages == ["decode runs on Pallas kernels"]


NO_GPU = "the kernels need an NVIDIA GPU of compute capability 9.0 or more, and this is "


@pytest.mark.parametrize(
    "model, rows, device, why",
    [
        (FULL_SIZE, 1, CPU, [NO_GPU + "a cpu"]),
        (FULL_SIZE, 1, gpu("NVIDIA A100-SXM4-80GB", "8.0"), [NO_GPU + "NVIDIA A100-SXM4-80GB of 8.0"]),
        (FULL_SIZE, 1, gpu("AMD Instinct MI300X", "gfx942"), [NO_GPU + "AMD Instinct MI300X"]),
        (FULL_SIZE, 9, H200, ["they take 8 sequences at once, and there are 9 slots (several groups of 8"]),
        (flint(jnp.float32), 1, H200, ["they compute in bfloat16, and dtype is float32"]),
        (INKLING, 1, H200, ["there are none for Inkling yet"]),
        (flint(head_dim=48), 1, H200, ["none is for 4 heads of 48 on 2 key heads"]),
        (flint(num_attention_heads=6), 1, H200, ["none is for 6 heads of 32 on 2 key heads"]),
        (flint(hidden_size=68), 1, H200, ["none is for 68 columns (a multiple of 8)"]),
        (flint(moe_intermediate_size=60), 1, H200, ["none is for 60 columns (a multiple of 8)"]),
        (
            flint(jnp.float32),
            16,
            CPU,
            [NO_GPU + "a cpu", "they compute in bfloat16, and dtype is float32", "they take 8 sequences at once"],
        ),
    ],
)  # fmt: skip
def test_elsewhere_plain_xla_runs_and_the_log_says_why(model, rows, device, why, caplog):
    caplog.set_level(logging.INFO)
    assert choose_kernels(model, "auto", rows, device) is None
    [message] = caplog.messages
    assert message.startswith("decode runs on plain XLA: ")
    assert all(reason in message for reason in why)
    with pytest.raises(
        KernelsError, match=r"^the Pallas decode kernels cannot run: .*\. Or leave kernels at auto$"
    ) as error:
        choose_kernels(model, "pallas", rows, device)
    assert all(reason in str(error.value) for reason in why)


def test_plain_is_taken_where_it_is_asked_for(caplog):
    caplog.set_level(logging.INFO)
    assert choose_kernels(FULL_SIZE, "plain", 1, H200) is None
    assert caplog.messages == ["decode runs on plain XLA, as requested"]


def test_what_is_compiled_for_a_gpu_elsewhere_is_not_held_against_this_device():
    assert choose_kernels(FULL_SIZE, "pallas", 8, None) == Kernels()
    with pytest.raises(KernelsError, match="9 slots"):
        choose_kernels(FULL_SIZE, "pallas", 9, None)


def test_columns_of_layers_that_there_are_none_of_do_not_count():
    model = flint(intermediate_size=60, sparse_layers=(True,) * 4)
    assert choose_kernels(model, "pallas", 1, H200)


def test_another_request_is_refused():
    with pytest.raises(ValueError, match="kernels must be one of auto, pallas, plain; not 'triton'"):
        choose_kernels(FULL_SIZE, "triton", 1, H200)


def test_inkling_has_no_kernels_to_run_with():
    assert jax.tree.structure(with_kernels(INKLING, None)) == jax.tree.structure(INKLING)
    with pytest.raises(ValueError, match="no kernels for Inkling"):
        with_kernels(INKLING, Kernels())
