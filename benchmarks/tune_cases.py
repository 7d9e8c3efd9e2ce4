"""The launches of a model's decode step as `benchmarks.tune` measures them: arguments, candidates, bytes read.

Random weights and activations of the model's shapes. Arguments are in three parts: `state`, which goes from launch to
launch, `fixed` ones, and each launch's `own`, among them its weights.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.full_size import abstract_model
from modeling.architecture import Config
from modeling.flint.model import Attention, Flint
from modeling.layers.linear import Linear
from modeling.layers.mlp import SwiGLU
from modeling.layers.moe import SparseMLP
from pallas_kernels import moe
from pallas_kernels import router as router_op
from pallas_kernels.decode_attention import Schedule, decode_attention, default_schedule, new_counters
from pallas_kernels.decode_attention.schedule import PAGE_SIZE, PROGRAMS, max_tiles
from pallas_kernels.dense_gemv import Blocks, Matrix, dense_gemv
from pallas_kernels.router import router
from pallas_kernels.tuning import attention_case, case_of

ROTATION = 64 << 20  # bytes read before anything is read again: more than the L2 cache holds
MAX_LAUNCHES = 32  # a program
CONTEXTS = (8_192, 102_400)  # tokens, of layers without a window
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one case's sizes.

    Attributes:
        kernel: how its kernel's name starts.
        candidates: sizes to try.
        num_bytes: what a launch must read.
        make: from a number of launches to (state, fixed, the launches' own).
        launch: from sizes=..., implementation=..., interpret=... to a function (state, fixed, own) -> (outputs, state).
        compared: the part of the outputs that every implementation writes.
    """

    op: str
    name: str
    kernel: str
    candidates: list[dict[str, int]]
    num_bytes: int
    num_launches: int
    make: Callable[[int], tuple[Any, Any, list]]
    launch: Callable[..., Callable]
    compared: Callable[[Any], Any] = lambda outputs: outputs

    def rate(self, us: float) -> float:
        """Terabytes a second."""
        return self.num_bytes / us / 1e6


def cases_of(config: Config, ops: Sequence[str], formats: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    """The cases of a model's decode steps, each once; of numbers of tokens that are one case, the largest counts."""
    found = {}
    for weight_format in formats:
        model = abstract_model(config, weight_format)
        assert isinstance(model, Flint)
        for num_tokens in sorted(tokens):
            for case in _model_cases(model, num_tokens):
                found[case.op, case.name] = case
    return [case for case in found.values() if case.op in ops]


def _model_cases(model: Flint, num_tokens: int) -> Iterator[Case]:
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        yield _gemv([_matrix(linear) for linear in projections], num_tokens, norm=True)
        yield from _attention(attention, num_tokens)
        yield _gemv([_matrix(attention.o_proj)], num_tokens)
        if isinstance(mlp, SparseMLP):
            yield _router(mlp, num_tokens)
            yield _gate_up(mlp, num_tokens)
            yield _down(mlp, num_tokens)
        else:
            assert isinstance(mlp, SwiGLU)
            yield _gemv([_matrix(mlp.gate_proj), _matrix(mlp.up_proj)], num_tokens, norm=True, activation="swiglu")
            yield _gemv([_matrix(mlp.down_proj)], num_tokens)
    yield _gemv([_matrix(model.lm_head)], num_tokens, out_dtype=jnp.float32)


def _gemv(matrices: list[Matrix], num_tokens: int, norm: bool = False, **options: Any) -> Case:
    columns = _shape(matrices[0])[-1]

    def make(num_launches: int) -> tuple[Any, Any, list]:
        keys = iter(jax.random.split(jax.random.key(0), 3 * num_launches + 1))
        norm_weight = _near_one(next(keys), columns) if norm else None
        own = []
        for _ in range(num_launches):
            x, residual = (_normal(next(keys), (num_tokens, columns)) for _ in range(2))
            own.append((x, residual if norm else None, _random(next(keys), matrices)))
        return (), norm_weight, own

    def launch(sizes: dict[str, int] | None = None, **how: Any) -> Callable:
        blocks = Blocks(**sizes) if sizes else None

        def run(state, norm_weight, own):
            x, residual, weights = own
            normed = dict(residual=residual, norm_weight=norm_weight, norm_eps=EPS)
            return dense_gemv(x, weights, **normed, **options, blocks=blocks, **how), state

        return run

    size = _bytes(matrices)
    return Case(
        "dense_gemv_swiglu" if options.get("activation") else "dense_gemv",
        case_of(matrices, num_tokens),
        "dense_gemv",
        _grid(row_groups=(1, 2, 4, 5), num_warps=(4, 8, 16)),
        size,
        _launches(size),
        make,
        launch,
    )


def _router(mlp: SparseMLP, num_tokens: int) -> Case:
    gate = _aval(mlp.gate)
    hidden = gate.shape[1]

    def make(num_launches: int) -> tuple[Any, Any, list]:
        keys = iter(jax.random.split(jax.random.key(0), 3 * num_launches + 1))
        norm_weight = _near_one(next(keys), hidden)
        own = []
        for _ in range(num_launches):
            x, residual = (_normal(next(keys), (num_tokens, hidden)) for _ in range(2))
            own.append((x, residual, _random(next(keys), gate)))
        return (), norm_weight, own

    def launch(sizes: dict[str, int] | None = None, **how: Any) -> Callable:
        options = dict(norm_eps=EPS, round_logits=mlp.router_dtype == "bfloat16")
        blocks = router_op.Blocks(**sizes) if sizes else None

        def run(state, norm_weight, own):
            x, residual, gate = own
            return router(x, residual, norm_weight, gate, **options, blocks=blocks, **how), state

        return run

    candidates, size = _grid(experts=(1, 2, 4), num_warps=(4, 8)), _bytes(gate)
    name = case_of([Matrix(gate)], num_tokens)
    return Case("router", name, "router", candidates, size, _launches(size), make, launch)


def _gate_up(mlp: SparseMLP, num_tokens: int) -> Case:
    experts, shared = ((_matrix(part.gate_proj), _matrix(part.up_proj)) for part in (mlp.experts, mlp.shared_expert))
    num_experts, _, hidden = _shape(experts[0])
    top_k = mlp.num_experts_per_tok
    size, num_launches = _moe_size(experts, shared, num_experts, top_k, num_tokens)

    def make(num_launches: int) -> tuple[Any, Any, list]:
        keys = iter(jax.random.split(jax.random.key(0), 3 * num_launches + 1))
        stacks, own = _random(next(keys), experts), []
        for i in range(num_launches):
            # Launches one after another have no experts in common.
            theirs = jnp.arange(num_experts) % num_launches == i
            logits = jax.random.normal(next(keys), (num_tokens, num_experts)) + jnp.where(theirs, 0.0, -20.0)
            own.append((_normal(next(keys), (num_tokens, hidden)), logits, _random(next(keys), shared)))
        return (), stacks, own

    def launch(sizes: dict[str, int] | None = None, **how: Any) -> Callable:
        rounds = mlp.router_dtype == "bfloat16"
        options = dict(top_k=top_k, normalise=mlp.norm_topk_prob, round_weights=rounds)
        blocks = moe.Blocks(**sizes) if sizes else None

        def run(state, stacks, own):
            x, logits, shared = own
            return moe.gate_up(x, logits, stacks, shared, **options, blocks=blocks, **how), state

        return run

    def written(outputs: list) -> list:
        out, shared_out, ids, count, weights = outputs
        return [jnp.where((weights > 0)[..., None], out, 0), shared_out, ids, count, weights]

    candidates, name = _grid(row_groups=(1, 2, 4), num_warps=(4, 8, 16)), case_of((experts[0], shared[0]), num_tokens)
    return Case("moe_gate_up", name, "moe_gate_up", candidates, size, num_launches, make, launch, written)


def _down(mlp: SparseMLP, num_tokens: int) -> Case:
    experts, shared = _matrix(mlp.experts.down_proj), _matrix(mlp.shared_expert.down_proj)
    (num_experts, hidden, inner), shared_inner = _shape(experts), _shape(shared)[1]
    num_slots = min(num_tokens * mlp.num_experts_per_tok, num_experts)
    distinct = _distinct(num_experts, mlp.num_experts_per_tok, num_tokens)
    size, num_launches = _moe_size(experts, shared, num_experts, mlp.num_experts_per_tok, num_tokens)

    def make(num_launches: int) -> tuple[Any, Any, list]:
        keys = iter(jax.random.split(jax.random.key(0), 4 * num_launches + 2))
        stack, own = _random(next(keys), experts), []
        order = jax.random.permutation(next(keys), num_experts)
        for i in range(num_launches):
            ids = jnp.full(num_slots, -1).at[:distinct].set(jnp.sort(jnp.roll(order, -i * distinct)[:distinct]))
            x = _normal(next(keys), (num_slots, num_tokens, inner))
            weights = jax.random.uniform(next(keys), (num_slots, num_tokens)) * (ids >= 0)[:, None]
            least = jnp.sort(weights, axis=0)[-mlp.num_experts_per_tok]  # that a token selects
            weights = jnp.where(weights >= least, weights, 0.0)
            shared_x = _normal(next(keys), (num_tokens, shared_inner))
            count = jnp.full(1, distinct)
            own.append((x, shared_x, ids, count, weights, _random(next(keys), shared)))
        return moe.new_counters(hidden), stack, own

    def launch(sizes: dict[str, int] | None = None, **how: Any) -> Callable:
        options = dict(top_k=mlp.num_experts_per_tok, blocks=moe.Blocks(**sizes) if sizes else None)

        def run(state, stack, own):
            x, shared_x, ids, count, weights, shared = own
            return moe.down(x, shared_x, ids, count, weights, state, stack, shared, **options, **how)

        return run

    candidates, name = _grid(down_row_groups=(1, 2, 4), down_warps=(4, 8, 16)), case_of((experts, shared), num_tokens)
    return Case("moe_down", name, "moe_down", candidates, size, num_launches, make, launch)


def _attention(attention: Attention, rows: int) -> Iterator[Case]:
    """Of a layer without a window, a case for each of `CONTEXTS`."""
    window, d = attention.window, attention.head_dim
    heads, kv_heads = (_shape(_matrix(proj))[0] // d for proj in (attention.q_proj, attention.k_proj))
    rotary = attention.rotary

    def case(context: int) -> Case:
        # Of a sliding layer, the ring that a window and a page more take.
        entries = math.ceil((context if window is None else window - 1 + PAGE_SIZE) / PAGE_SIZE)
        seen = context if window is None else window
        size = 2 * 2 * rows * kv_heads * d * seen

        def make(num_launches: int) -> tuple[Any, Any, list]:
            keys = iter(jax.random.split(jax.random.key(0), 2 * num_launches + 6))
            num_pages = num_launches * rows * entries
            shape = (num_pages, kv_heads, PAGE_SIZE, d)
            pools = [_normal(next(keys), shape) for _ in range(2)]
            tables = jax.random.permutation(next(keys), num_pages).astype(jnp.int32)
            fixed = dict(
                q_norm=_near_one(next(keys), d),
                k_norm=_near_one(next(keys), d),
                sinks=jax.random.normal(next(keys), (heads,)),
                positions=jnp.full(rows, context - 1, jnp.int32),
                valid=jnp.ones(rows, bool),
            )
            own = []
            for table in tables.reshape(num_launches, rows, entries):
                angle = jax.random.uniform(next(keys), (rows, d // 2), minval=-3, maxval=3)
                qkv = _normal(next(keys), (rows, (heads + 2 * kv_heads) * d))
                own.append(dict(qkv=qkv, rope=(jnp.cos(angle), jnp.sin(angle)) if rotary else None, table=table))
            return (*pools, new_counters(rows, kv_heads)), fixed, own

        def launch(sizes: dict[str, int] | None = None, **how: Any) -> Callable:
            options = dict(window=window, eps=EPS, schedule=Schedule(**sizes) if sizes else None)

            def run(state, fixed, own):
                arguments = dict(zip(("k_pool", "v_pool", "counters"), state, strict=True)) | fixed | own
                out, *state = decode_attention(**arguments, **options, **how)
                return out, tuple(state)

            return run

        name, candidates = attention_case(rows, kv_heads, entries, window), _schedules(rows, kv_heads, entries, window)
        kernel = "decode_attention"
        return Case(kernel, name, kernel, candidates, size, _launches(size), make, launch)

    return map(case, CONTEXTS if window is None else CONTEXTS[-1:])


def _schedules(rows: int, kv_heads: int, entries: int, window: int | None) -> list[dict[str, int]]:
    """The default schedule, and others: a tile or several a split, one to three programs a processor."""
    found = [default_schedule(rows, kv_heads, entries, window)]
    for keys, warps, stages in ((64, 4, 3), (64, 4, 4), (64, 8, 4), (32, 4, 4), (128, 8, 3)):
        tiles = max_tiles(entries, window, keys)
        if window is None:
            wanted = [(each * PROGRAMS // 3 - 1) // (rows * kv_heads) for each in (1, 2, 3)]  # on a processor
        else:
            wanted = [tiles, math.ceil(tiles / 2)]
        for splits in wanted:
            splits = max(1, min(tiles, splits))
            found.append(Schedule(splits, keys, warps, min(stages, math.ceil(tiles / splits) + 1)))
    return [dataclasses.asdict(schedule) for schedule in dict.fromkeys(found)]


# -- shapes, sizes and random arrays ---------------------------------------------------------------------------------


def _matrix(linear: Linear) -> Matrix:
    if linear.weight_format == "bf16":
        return Matrix(_aval(linear.weight))
    return Matrix(_aval(linear.codes), _aval(linear.scales), _aval(linear.global_scale))


def _aval(parameter: Any) -> jax.ShapeDtypeStruct:
    [leaf] = jax.tree.leaves(parameter)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shape(matrix: Matrix) -> tuple[int, ...]:
    *lead, last = matrix.weight.shape
    return *lead, last if matrix.scales is None else 4 * last


def _grid(**sizes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _launches(size: int) -> int:
    return min(MAX_LAUNCHES, max(2, math.ceil(ROTATION / size)))


def _distinct(num_experts: int, top_k: int, num_tokens: int) -> int:
    """The experts that tokens which choose at random are expected to choose."""
    return round(num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))


def _moe_size(experts: Any, shared: Any, num_experts: int, top_k: int, num_tokens: int) -> tuple[int, int]:
    """Bytes a launch, and as many launches as have experts of their own."""
    distinct = _distinct(num_experts, top_k, num_tokens)
    size = _bytes(experts) * distinct // num_experts + _bytes(shared)
    return size, min(_launches(size), max(1, num_experts // distinct))


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _near_one(key: jax.Array, size: int) -> jax.Array:
    return (1 + 0.2 * jax.random.normal(key, (size,))).astype(jnp.bfloat16)


def _random(key: jax.Array, tree: Any) -> Any:
    """Weights of these shapes. NVFP4's codes are arbitrary, its scales positive."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(_random_leaf, jax.random.split(key, len(leaves)), leaves))


@functools.partial(jax.jit, static_argnums=1)
def _random_leaf(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if leaf.dtype == jnp.uint16:  # codes
        return jax.random.bits(key, leaf.shape, leaf.dtype)
    if leaf.dtype == jnp.uint8:  # E4M3 scales below 2
        return jax.random.bits(key, leaf.shape, leaf.dtype) & 0x3F
    if leaf.ndim < 2:  # global scales
        return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.005, 0.01)
    return jax.random.normal(key, leaf.shape, leaf.dtype) / math.sqrt(leaf.shape[-1])
