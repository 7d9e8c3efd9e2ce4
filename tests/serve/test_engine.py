"""The engine against the scorer, alone and in company, and what it does when things go wrong."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_flint

from modeling.cache import CacheShape
from modeling.sampling import MAX_TOP_LOGPROBS, TopLogprobs
from modeling.score import score
from serve import engine as engine_module
from serve import programs
from serve.engine import Engine, EngineConfig
from serve.logprobs import token_logprob
from serve.request import MAX_LOGPROBS, EngineBusy, EngineClosed, InvalidRequest, Output, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
CONFIG = EngineConfig(
    num_slots=3, prefill_chunks=(16, 64), max_model_len=512, decode_steps=4, max_queue=8, progress=False
)


@pytest.fixture(scope="module")
def model():
    return tiny_flint(max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, CONFIG) as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng([seed, length]).integers(0, 128, length))


def run(engine, *requests: Request):
    return {done.request_id: done for done in engine.generate(requests)}


def one(engine, tokens, sampling=GREEDY):
    return next(iter(engine.generate([Request("one", tuple(tokens), sampling)])))


def submit(engine, request):
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request, outputs.put)
    return outputs


def until_finished(outputs) -> list[Output]:
    news = []
    while not news or news[-1].finish_reason is None:
        news.append(outputs.get(timeout=60))
    return news


def assert_greedy(model, done, tokens):
    """Each token is the argmax of the scorer's logits at its place."""
    sequence = np.array([*tokens, *done.token_ids], np.int32)
    padded = np.zeros((1, 512), np.int32)
    padded[0, : len(sequence)] = sequence
    logits = score(model, padded).logits[0]
    first = len(tokens) - 1
    assert logits[first : first + len(done.token_ids)].argmax(-1).tolist() == list(done.token_ids)
    return logits


# Page and chunk borders on both sides, prompts of one token, windows not yet full.
LENGTHS = (1, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200)


def test_tokens_equal_the_scorers_argmax_in_company(engine, model):
    """Twelve requests on three slots: chunked, batched with others that start and stop, pages handed on."""
    done = run(engine, *(Request(f"r{n}", prompt(n), GREEDY) for n in LENGTHS))
    for n in LENGTHS:
        assert len(done[f"r{n}"].token_ids) == 40
        assert_greedy(model, done[f"r{n}"], prompt(n))


def test_alone_equals_in_company(engine):
    together = run(engine, *(Request(f"r{n}", prompt(n), GREEDY) for n in LENGTHS))
    for n in (1, 65, 200):
        assert one(engine, prompt(n)).token_ids == together[f"r{n}"].token_ids


def test_packed_weights_serve_the_scorers_argmax():
    model = tiny_flint(weight_format="nvfp4", max_position_embeddings=512)
    with Engine(model, CONFIG) as engine:
        done = run(engine, *(Request(f"r{n}", prompt(n), GREEDY) for n in (3, 65, 130)))
        for n in (3, 65, 130):
            assert_greedy(model, done[f"r{n}"], prompt(n))


def test_logprobs_and_prompt_logprobs_are_the_scorers(engine, model):
    tokens = prompt(70)
    sampling = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, prompt_logprobs=2)
    done = one(engine, tokens, sampling)
    logits = assert_greedy(model, done, tokens).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, entry in enumerate(done.logprobs):
        row = logprobs[len(tokens) - 1 + i]
        assert abs(entry.logprob - row[entry.token_id]) < 1e-4
        assert [t for t, _ in entry.top] == np.argsort(-row)[:3].tolist()
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(tokens)
    for i, entry in enumerate(done.prompt_logprobs[1:]):
        assert entry.token_id == tokens[i + 1]
        assert abs(entry.logprob - logprobs[i, tokens[i + 1]]) < 1e-4
        assert len(entry.top) == 2


def test_prompt_logprobs_do_not_change_the_tokens(engine):
    plain = one(engine, prompt(70))
    scored = one(engine, prompt(70), SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=0))
    assert plain.token_ids == scored.token_ids


def test_sa03_seeded_tokens_do_not_depend_on_company(engine):
    sampling = SamplingParams(seed=42, max_tokens=25, top_p=0.95, top_k=20)
    alone = one(engine, prompt(9), sampling)
    for company in range(2):
        others = [Request(f"o{i}", prompt(7 + i, seed=company), SamplingParams(max_tokens=30)) for i in range(4)]
        done = run(engine, *others[:company], Request("seeded", prompt(9), sampling), *others[company:])
        assert done["seeded"].token_ids == alone.token_ids
    other_seed = one(engine, prompt(9), SamplingParams(seed=43, max_tokens=25, top_p=0.95, top_k=20))
    assert other_seed.token_ids != alone.token_ids
    unseeded = {one(engine, prompt(9), SamplingParams(max_tokens=25)).token_ids for _ in range(3)}
    assert len(unseeded) == 3


def test_jx03_staggered_requests_give_the_same_answers_every_time(engine):
    expected = None
    for _ in range(50):
        outputs = []
        for i in range(3):
            outputs.append(
                submit(engine, Request(f"s{i}", prompt(20 + 30 * i), SamplingParams(temperature=0.0, max_tokens=12)))
            )
            time.sleep(0.001 * i)
        answers = [sum((o.token_ids for o in until_finished(out)), ()) for out in outputs]
        expected = expected or answers
        assert answers == expected


def test_jx06_no_compilation_after_ready(engine):
    everything = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, max_tokens=3, seed=1),
        SamplingParams(max_tokens=9, logprobs=5, prompt_logprobs=5),
        SamplingParams(max_tokens=9, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=1),
        SamplingParams(max_tokens=9, logit_bias={3: 5.0}, stop_token_ids=(7, 8), min_tokens=2, ignore_eos=True),
    ]
    run(engine, *(Request(f"r{i}-{n}", prompt(n), s) for i, s in enumerate(everything) for n in (1, 16, 100)))
    assert engine.compiles_since_ready == 0


def test_the_compile_counter_counts(engine):
    """The counter is not merely stuck at zero: a compilation on the engine's thread moves it."""
    before = engine.compiles_since_ready
    ran = threading.Event()
    engine._inbox.put(lambda: (jax.jit(lambda x: x * 3.25 + before)(jnp.ones(7)).block_until_ready(), ran.set()))
    assert ran.wait(30)
    assert engine.compiles_since_ready > before
    engine.compiles_since_ready = before


def test_max_tokens_and_the_context_limit(engine):
    assert one(engine, prompt(5), SamplingParams(temperature=0.0, max_tokens=1)).finish_reason == "length"
    long = one(engine, prompt(500), SamplingParams(temperature=0.0))
    assert (len(long.token_ids), long.finish_reason) == (12, "length")
    capped = one(engine, prompt(500), SamplingParams(temperature=0.0, max_tokens=100))
    assert capped.token_ids == long.token_ids


def test_stop_tokens_end_a_request_and_ignore_eos_keeps_it_going(engine, model):
    plain = one(engine, prompt(30)).token_ids
    stop = plain[6]
    first = plain.index(stop)
    done = one(engine, prompt(30), SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason, done.matched_token_id) == (plain[: first + 1], "stop", stop)
    with Engine(model, CONFIG, eos_token_ids=(stop, 1, 2)) as other:  # sa10, tk07: several end ids
        assert one(other, prompt(30)).token_ids == plain[: first + 1]
        ignoring = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        assert one(other, prompt(30), ignoring).token_ids == plain
        user = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        assert one(other, prompt(30), user).token_ids == plain[: first + 1]
        late = one(other, prompt(30), SamplingParams(temperature=0.0, max_tokens=40, min_tokens=first + 5))
        assert len(late.token_ids) >= first + 5
        assert not set(late.token_ids[: first + 4]) & {stop, 1, 2}


def test_logit_bias_forces_and_bans(engine):
    forced = one(engine, prompt(5), SamplingParams(temperature=0.0, max_tokens=6, logit_bias={17: 100.0}))
    assert set(forced.token_ids) == {17}
    favourite = one(engine, prompt(5)).token_ids[0]
    banned = one(engine, prompt(5), SamplingParams(temperature=0.0, max_tokens=6, logit_bias={favourite: -100.0}))
    assert favourite not in banned.token_ids
    assert one(engine, prompt(5)).token_ids[0] == favourite  # the slot's next request starts clean


def test_penalties_start_clean_in_a_reused_slot(engine):
    plain = one(engine, prompt(12)).token_ids
    one(
        engine,
        prompt(12),
        SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=2.0, repetition_penalty=3.0),
    )
    assert one(engine, prompt(12)).token_ids == plain


@pytest.mark.parametrize(
    "tokens, sampling, words",
    [
        ((), {}, "empty"),
        ((1, 128), {}, "0..127"),
        ((1, -1), {}, "0..127"),
        ((1,) * 512, {}, "512 tokens"),
        ((1,), dict(temperature=-1), "temperature"),
        ((1,), dict(temperature=float("nan")), "finite"),
        ((1,), dict(top_k=-2), "top_k"),
        ((1,), dict(top_p=0.0), "top_p"),
        ((1,), dict(top_p=1.1), "top_p"),
        ((1,), dict(min_p=-0.1), "min_p"),
        ((1,), dict(repetition_penalty=0), "repetition_penalty"),
        ((1,), dict(repetition_penalty=1e-38), "repetition_penalty"),
        ((1,), dict(max_tokens=0), "max_tokens"),
        ((1,), dict(max_tokens=-5), "max_tokens"),
        ((1,), dict(max_tokens=3, min_tokens=4), "min_tokens"),
        ((1,), dict(min_tokens=2**40), "min_tokens"),
        ((1,), dict(temperature=1e39), "finite"),
        ((1,), dict(repetition_penalty=1e39), "finite"),
        ((1,), dict(logprobs=21), "logprobs"),
        ((1,), dict(stop_token_ids=tuple(range(17))), "stop_token_ids"),
        ((1,), dict(stop_token_ids=(128,)), "stop_token_ids"),
        ((1,), dict(logit_bias={128: 1.0}), "logit_bias"),
        ((1,), dict(logit_bias={1: float("inf")}), "logit_bias"),
        ((1,), dict(logit_bias=dict.fromkeys(range(128), 1.0) | {i: 1.0 for i in range(600)}), "logit_bias"),
    ],
)
def test_bad_requests_are_refused_at_the_door(engine, tokens, sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        engine.submit(Request("bad", tokens, SamplingParams(**sampling)), lambda output: None)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_abort_frees_everything_and_disturbs_nobody(engine):
    expected = one(engine, prompt(33)).token_ids
    victims = [submit(engine, Request(f"v{i}", prompt(20 + i), SamplingParams(temperature=0.0))) for i in range(6)]
    steady = submit(engine, Request("steady", prompt(33), GREEDY))
    victims[0].get(timeout=60)  # running; the last ones are still queued
    for i in reversed(range(6)):
        assert engine.abort(f"v{i}")
    for outputs in victims:
        assert until_finished(outputs)[-1].finish_reason == "abort"
    assert sum((o.token_ids for o in until_finished(steady)), ()) == expected
    assert not engine.abort("v0")
    assert not engine.abort("never seen")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


def test_jx10_a_step_that_raises_loses_only_its_requests(engine, monkeypatch):
    expected = one(engine, prompt(40)).token_ids
    original = programs.Programs.decode
    calls = []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 2:
            original(self, *args)  # the donated buffers are gone by now
            raise RuntimeError("device on fire")
        return original(self, *args)

    monkeypatch.setattr(programs.Programs, "decode", failing)
    news = until_finished(submit(engine, Request("doomed", prompt(40), GREEDY)))
    assert news[-1].finish_reason == "error"
    assert "device on fire" in news[-1].error
    assert one(engine, prompt(40)).token_ids == expected
    assert engine.stats().kv_pages_used == 0


def test_jx10_a_step_that_raises_before_it_ran(engine, monkeypatch):
    expected = one(engine, prompt(40)).token_ids
    for name in ("prefill", "admit"):
        with monkeypatch.context() as patch:
            patch.setattr(programs.Programs, name, lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")))
            assert until_finished(submit(engine, Request("doomed", prompt(40), GREEDY)))[-1].finish_reason == "error"
        assert one(engine, prompt(40)).token_ids == expected
    outputs = submit(engine, Request("victim", prompt(20), SamplingParams(temperature=0.0)))
    outputs.get(timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(programs.Programs, "release", lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")))
        engine.abort("victim")
        assert until_finished(outputs)[-1].finish_reason == "error"
    assert one(engine, prompt(40)).token_ids == expected
    assert engine.is_alive


def test_an_engine_that_cannot_go_on_says_so_and_leaves_nobody_waiting(model, monkeypatch):
    with Engine(model, CONFIG) as engine:
        outputs = [submit(engine, Request(f"r{i}", prompt(20), SamplingParams(temperature=0.0))) for i in range(5)]
        outputs[0].get(timeout=60)
        broken = lambda *_: (_ for _ in ()).throw(RuntimeError("device lost"))  # noqa: E731
        monkeypatch.setattr(programs.Programs, "decode", broken)
        monkeypatch.setattr(programs.Programs, "reset", broken)
        for out in outputs:
            assert until_finished(out)[-1].finish_reason == "error"
        assert not engine.is_alive
        with pytest.raises(EngineClosed):
            submit(engine, Request("late", prompt(3), GREEDY))
        monkeypatch.undo()


def test_an_engine_starts_once_and_is_collected_when_closed(model):
    import gc
    import weakref

    engine = Engine(model, CONFIG)
    with engine:
        one(engine, prompt(3))
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_a_reset_never_holds_two_caches(engine, monkeypatch):
    one(engine, prompt(3))
    live = sum(array.nbytes for array in jax.live_arrays())
    size = sum(pool.nbytes for pool in jax.tree.leaves(engine._programs.cache))
    seen = []
    original = programs.make_cache
    monkeypatch.setattr(
        programs, "make_cache", lambda *a: (seen.append(sum(x.nbytes for x in jax.live_arrays())), original(*a))[1]
    )
    engine._inbox.put(engine._programs.reset)
    one(engine, prompt(3))
    assert seen and seen[0] <= live - size


def test_generate_checks_every_request_before_it_starts_any(engine):
    good, bad = Request("good", prompt(3), GREEDY), Request("bad", (), GREEDY)
    with pytest.raises(InvalidRequest):
        next(engine.generate([good, bad]))
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_an_abandoned_generate_aborts_its_requests(engine):
    iterator = engine.generate([Request("short", prompt(3), GREEDY), *(
        Request(f"long{i}", prompt(9), SamplingParams(temperature=0.0)) for i in range(3))])  # fmt: skip
    next(iterator)
    iterator.close()
    deadline = time.monotonic() + 10
    while engine.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().kv_pages_used == 0


def test_a_model_on_several_devices_is_refused(model):
    class Spread:
        device_set = (0, 1)

    leaf = type("Leaf", (), {"sharding": Spread()})()
    spread = jax.tree.map(lambda _: leaf, model)
    with pytest.raises(ValueError, match="one device"):
        Engine(spread, CONFIG)


def test_a_reader_that_raises_disturbs_nobody(engine):
    for fault in (ValueError, SystemExit):

        def broken(output, fault=fault):
            raise fault("reader bug")

        engine.submit(Request("broken", prompt(4), GREEDY), broken)
        assert len(one(engine, prompt(4)).token_ids) == 40


def test_a_request_that_cannot_be_admitted_is_lost_alone(engine, monkeypatch):
    steady = submit(engine, Request("steady", prompt(9), GREEDY))
    original = engine_module.admission

    def admission(row, sequence, *rest):
        if sequence.request.request_id == "strange":
            raise OverflowError("out of bounds")
        return original(row, sequence, *rest)

    monkeypatch.setattr(engine_module, "admission", admission)
    assert until_finished(submit(engine, Request("strange", prompt(3), GREEDY)))[-1].finish_reason == "error"
    assert until_finished(steady)[-1].finish_reason == "length"
    assert engine.stats().kv_pages_used == 0


def test_end_ids_outside_the_vocabulary_are_refused(model):
    for bad in (-1, 128, 2**40):
        with pytest.raises(ValueError, match="end token ids"):
            Engine(model, CONFIG, eos_token_ids=(bad,))


def test_a_context_without_room_for_an_answer_is_refused(model):
    for length in (1, 0, -5):
        with pytest.raises(ValueError, match=f"max_model_len must be at least 2.*{length}"):
            Engine(model, dataclasses.replace(CONFIG, max_model_len=length))


def test_queue_limit_and_duplicate_ids(engine):
    accepted = []

    def flood():
        for i in range(20):
            accepted.append(submit(engine, Request(f"q{i}", prompt(100), GREEDY)))  # noqa: PERF401

    with pytest.raises(EngineBusy, match="try again"):
        flood()
    assert len(accepted) == CONFIG.max_queue + CONFIG.num_slots
    with pytest.raises((InvalidRequest, EngineBusy)):
        submit(engine, Request("q10", prompt(3), GREEDY))
    for outputs in accepted:
        assert until_finished(outputs)[-1].finish_reason == "length"


def test_generate_takes_more_requests_than_the_queue_holds(engine):
    done = run(
        engine, *(Request(f"r{i}", prompt(3 + i % 5), SamplingParams(temperature=0.0, max_tokens=3)) for i in range(60))
    )
    assert len(done) == 60


def test_at18_what_cannot_fit_is_refused_at_start(model):
    with pytest.raises(ValueError, match="lower max_model_len"):
        Engine(model, EngineConfig(num_slots=3, cache_bytes=100_000, progress=False))


def test_a_request_larger_than_the_whole_cache_is_refused(model):
    shape = EngineConfig(num_slots=2, prefill_chunks=(16,), max_model_len=512, progress=False)
    small = Engine(model, shape)
    # Room for one sequence of 512 only: two slots share it, and the third waits.
    assert small._scheduler.full_pool.num_pages == 16
    small._scheduler.full_pool.num_pages = 2
    with pytest.raises(InvalidRequest, match="whole cache"):
        small.submit(Request("big", prompt(300), GREEDY), lambda output: None)


def test_drain_finishes_what_runs_and_refuses_what_comes(model):
    engine = Engine(model, CONFIG)
    with pytest.raises(EngineClosed):
        submit(engine, Request("early", prompt(3), GREEDY))
    engine.start()
    outputs = submit(engine, Request("last", prompt(30), GREEDY))
    engine.drain(timeout_s=30)
    assert until_finished(outputs)[-1].finish_reason == "length"
    with pytest.raises(EngineClosed):
        submit(engine, Request("late", prompt(3), GREEDY))
    engine.close()
    engine.close()


def test_close_aborts_what_runs(model):
    engine = Engine(model, CONFIG)
    engine.start()
    outputs = submit(engine, Request("long", prompt(30), SamplingParams(temperature=0.0)))
    outputs.get(timeout=60)
    engine.close()
    assert until_finished(outputs)[-1].finish_reason in ("abort", "length")


def test_cache_memory_does_not_grow_while_serving(engine):
    one(engine, prompt(100))
    before = sum(array.nbytes for array in jax.live_arrays())
    places = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(engine._programs.cache)]
    run(
        engine, *(Request(f"r{i}", prompt(60 + i), SamplingParams(temperature=0.0)) for i in range(3))
    )  # > 1,000 tokens
    assert sum(array.nbytes for array in jax.live_arrays()) == before
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(engine._programs.cache)] == places


@pytest.mark.parametrize("max_len, slots", [(2, 2), (65, 2)])
def test_a_cache_for_one_sequence_serves_a_queue(model, max_len, slots):
    """Two slots, pages for one full sequence: requests wait for pages, none for ever, and give all back."""
    shape = CacheShape.for_sequences(model.config, slots, max_len, max_chunk=16)
    least = dataclasses.replace(shape, num_full_pages=shape.max_pages).bytes(model.config, model.dtype)
    config = EngineConfig(
        num_slots=slots, max_model_len=max_len, prefill_chunks=(16,), cache_bytes=least, decode_steps=4, progress=False
    )
    with Engine(model, config) as engine:
        assert engine.stats().kv_pages_total == shape.max_pages
        lengths = [min(1 + 7 * i, max_len - 1) for i in range(8)]
        sampling = SamplingParams(temperature=0.0, max_tokens=5)
        done = run(engine, *(Request(f"r{i}", prompt(n, seed=i), sampling) for i, n in enumerate(lengths)))
        assert [len(done[f"r{i}"].token_ids) for i in range(8)] == [min(5, max_len - n) for n in lengths]
        assert engine.stats().kv_pages_used == 0


def test_requests_may_ask_for_as_many_logprobs_as_the_device_gives():
    assert MAX_LOGPROBS == MAX_TOP_LOGPROBS  # two layers, one number; the request's has no JAX behind it


def test_sa08_infinite_logprobs_are_floored():
    scores = TopLogprobs(np.float32(-np.inf), np.array([0.0, -np.inf], np.float32), np.array([3, 4], np.int32))
    entry = token_logprob(4, scores, (), 2)
    assert (entry.logprob, entry.top) == (-9999.0, ((3, 0.0), (4, -9999.0)))
    absent = token_logprob(900, scores._replace(chosen=np.float32(np.nan)), (), 0)  # a token without a logit
    assert absent.logprob == -9999.0
