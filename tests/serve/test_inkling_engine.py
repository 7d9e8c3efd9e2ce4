"""Inkling in the engine: speculation changes no token, and media go where their placeholders are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_inkling import definition, tiny_inkling

from modeling.batch import MediaRows
from modeling.inkling.media import embed_media
from modeling.inkling.mtp import draft
from serve import programs
from serve.engine import Engine, EngineConfig
from serve.request import InvalidRequest, Media, Request, SamplingParams

CONFIG = EngineConfig(
    num_slots=3, prefill_chunks=(16,), max_model_len=192, decode_steps=4, num_draft_tokens=0, progress=False
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 40, 63, 64, 65)


@pytest.fixture(scope="module")
def model():
    return tiny_inkling(towers=True)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng([seed, length]).integers(0, 140, length))


def requests() -> list[Request]:
    """Greedy and sampled, short and long, with every rule that looks at what was generated before."""
    sampled = SamplingParams(temperature=1.3, top_p=0.9, top_k=30, max_tokens=30)
    rules = dict(
        plain={},
        repeat=dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
        late=dict(min_tokens=12, stop_token_ids=tuple(range(20, 34))),
        bias=dict(logit_bias={7: 4.0, 9: 3.0}),
    )
    return [
        Request(f"{kind}-{rule}-{n}", prompt(n), dataclasses.replace(sampling, seed=n, **changes))
        for kind, sampling in (("greedy", GREEDY), ("sampled", sampled))
        for rule, changes in rules.items()
        for n in (LENGTHS if rule == "plain" else (5, 40))
    ]


def answers(model, config, work):
    with Engine(model, config) as engine:
        done = {one.request_id: one for one in engine.generate(work)}
        assert engine.compiles_since_ready == 0
        return done


@pytest.fixture(scope="module")
def plain(model):
    return answers(model, CONFIG, requests())


def test_greedy_tokens_are_the_definitions(model, plain):
    for n in LENGTHS:
        sequence = [*prompt(n), *plain[f"greedy-plain-{n}"].token_ids]
        row = np.zeros((1, 192), np.int32)
        row[0, : len(sequence)] = sequence
        best = definition(model, row)[0][0].argmax(-1)
        assert best[n - 1 : len(sequence) - 1].tolist() == sequence[n:]


def scripted(plain, corrupted: np.ndarray):
    """The real drafting, so that the depths' caches are used, and then the right drafts but for some places.

    Every sequence is recognised by its newest token and length; what follows is read from the plain answers.
    """
    table = np.full((192, 160), -1, np.int32)
    for request in requests():
        sequence = [*request.prompt_token_ids, *plain[request.request_id].token_ids]
        for place in range(len(request.prompt_token_ids), len(sequence) - 1):
            table[place, sequence[place]] = sequence[place + 1]
    table, corrupted = jnp.asarray(table), jnp.asarray(corrupted)

    def forced(model, tokens, lengths, active, pages, cache):
        drafts, cache = draft(model, tokens, lengths, active, pages, cache)
        columns = []
        for depth in range(drafts.shape[1]):
            follows = table[jnp.clip(lengths + depth, 0, 191), tokens]
            wrong = (follows < 0) | corrupted[jnp.clip(lengths + depth, 0, 191)]
            tokens = jnp.where(wrong, drafts[:, depth], follows)
            columns.append(tokens)
        return jnp.stack(columns, axis=1), cache

    return forced


@pytest.mark.parametrize("num_drafts, wrong", [(1, 0.3), (3, 0.0), (3, 0.35)])
def test_tokens_with_speculation_are_those_without(model, plain, num_drafts, wrong, monkeypatch):
    """Greedy and sampled alike, whatever is accepted: none to all of the drafts of a step."""
    corrupted = np.random.default_rng(num_drafts).random(192) < wrong
    monkeypatch.setattr(programs, "draft", scripted(plain, corrupted))
    done = answers(model, dataclasses.replace(CONFIG, num_draft_tokens=num_drafts), requests())
    assert {i: one.token_ids for i, one in done.items()} == {i: one.token_ids for i, one in plain.items()}
    assert {i: one.finish_reason for i, one in done.items()} == {i: one.finish_reason for i, one in plain.items()}
    counts = [one.speculation for one in done.values()]
    accepted = sum(count.num_accepted_tokens for count in counts)
    assert accepted > 0.25 * sum(count.num_draft_tokens for count in counts)
    for one, count in zip(done.values(), counts, strict=True):
        # The first token comes from the prompt; each step gives one token beside its accepted drafts.
        assert count.num_steps + count.num_accepted_tokens == len(one.token_ids) - 1
        assert sum(count.accepted_by_depth) == count.num_accepted_tokens
        assert list(count.accepted_by_depth) == sorted(count.accepted_by_depth, reverse=True)


def test_logprobs_with_speculation_are_those_without(model, plain, monkeypatch):
    monkeypatch.setattr(programs, "draft", scripted(plain, np.zeros(192, bool)))
    work = [
        Request(f"greedy-plain-{n}", prompt(n), dataclasses.replace(GREEDY, seed=n, logprobs=3, prompt_logprobs=2))
        for n in (5, 40)
    ]
    without = answers(model, CONFIG, work)
    done = answers(model, dataclasses.replace(CONFIG, num_draft_tokens=3), work)
    for one in work:
        a, b = done[one.request_id], without[one.request_id]
        assert a.token_ids == b.token_ids
        assert a.speculation.num_accepted_tokens > 0
        for x, y in zip((*a.logprobs, *a.prompt_logprobs[1:]), (*b.logprobs, *b.prompt_logprobs[1:]), strict=True):
            assert [i for i, _ in x.top] == [i for i, _ in y.top]
            np.testing.assert_allclose([v for _, v in x.top], [v for _, v in y.top], atol=1e-4)


def test_ck15_more_drafts_than_depths_are_refused(model):
    with pytest.raises(ValueError, match=r"num_draft_tokens must be 0\.\.3"):
        Engine(model, dataclasses.replace(CONFIG, num_draft_tokens=4))
    shallow = tiny_inkling(num_mtp_layers=1)
    assert Engine(shallow, dataclasses.replace(CONFIG, num_draft_tokens=None)).num_draft_tokens == 1
    assert Engine(tiny_inkling(num_mtp_layers=0), CONFIG).num_draft_tokens == 0


# -- media ------------------------------------------------------------------------------------------------------------

IMAGE, AUDIO = 148, 149


def picture(patches: int, seed: int, offset: int) -> Media:
    rows = np.random.default_rng(seed).standard_normal((patches, 2, 4, 4, 3)).astype(np.float32)
    return Media("image", rows, offset)


def clip(frames: int, seed: int, offset: int) -> Media:
    return Media("audio", np.random.default_rng(seed).integers(0, 4, (frames, 8)).astype(np.uint8), offset)


def with_media(*media: Media, length: int = 90, seed: int = 0) -> Request:
    tokens = np.array(prompt(length, seed))
    for item in media:
        tokens[item.offset : item.offset + len(item.rows)] = IMAGE if item.kind == "image" else AUDIO
    return Request(f"media-{length}-{seed}", tuple(tokens.tolist()), GREEDY, media)


MEDIA = {
    "a picture over chunk borders": with_media(picture(40, 1, 5)),
    "au-06 two clips of other lengths": with_media(clip(7, 2, 3), clip(33, 3, 20), seed=1),
    "im-10 pictures and sound between texts": with_media(
        picture(6, 1, 2), clip(9, 2, 12), picture(6, 4, 30), clip(1, 5, 88), seed=2
    ),
    "side by side, up to the end": with_media(picture(3, 6, 0), picture(5, 7, 3), clip(20, 8, 70), seed=3),
    "text beside it": Request("text", prompt(50), GREEDY),
}


@pytest.fixture(scope="module")
def media_engine(model):
    with Engine(model, dataclasses.replace(CONFIG, num_draft_tokens=2)) as engine:
        yield engine


def test_answers_to_media_are_the_definitions(model, media_engine):
    """All at once, and so each beside others: the logits of one pass with the towers' outputs in place."""
    done = {one.request_id: one for one in media_engine.generate(MEDIA.values())}
    for name, request in MEDIA.items():
        sequence = [*request.prompt_token_ids, *done[request.request_id].token_ids]
        row = np.zeros((1, 192), np.int32)
        row[0, : len(sequence)] = sequence
        embeds, here = np.zeros((1, 192, 32), np.float32), np.zeros((1, 192), bool)
        for item in request.media:
            place = slice(item.offset, item.offset + len(item.rows))
            embeds[0, place], here[0, place] = embed_media(model, item.kind, item.rows), True
        best = definition(model, row, MediaRows(jnp.asarray(embeds), jnp.asarray(here)))[0][0].argmax(-1)
        n = len(request.prompt_token_ids)
        assert best[n - 1 : len(sequence) - 1].tolist() == sequence[n:], name
    assert media_engine.compiles_since_ready == 0


def test_towers_run_once_for_what_was_seen_before(media_engine):
    again = [
        dataclasses.replace(request, request_id=f"{request.request_id}-{i}")
        for i in range(3)
        for request in MEDIA.values()
    ]
    list(media_engine.generate(again[:5]))
    misses = media_engine._towers.misses
    done = list(media_engine.generate(again[5:]))
    assert media_engine._towers.misses == misses
    assert len({one.token_ids for one in done}) == len(MEDIA)


def test_fr05_prompt_logprobs_are_those_of_each_prefix(model, media_engine):
    """Chunks, media and drafts included: the first place is empty, the others are the definition's."""
    request = with_media(picture(20, 1, 5), length=70, seed=4)
    request = dataclasses.replace(request, sampling=dataclasses.replace(GREEDY, prompt_logprobs=3))
    done = next(iter(media_engine.generate([request])))
    embeds, here = np.zeros((1, 70, 32), np.float32), np.zeros((1, 70), bool)
    embeds[0, 5:25], here[0, 5:25] = embed_media(model, "image", request.media[0].rows), True
    row = np.array([request.prompt_token_ids], np.int32)
    logits = definition(model, row, MediaRows(jnp.asarray(embeds), jnp.asarray(here)))[0][0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    assert done.prompt_logprobs[0] is None
    for place, entry in enumerate(done.prompt_logprobs[1:]):
        assert entry.token_id == request.prompt_token_ids[place + 1]
        np.testing.assert_allclose(entry.logprob, logprobs[place, entry.token_id], atol=1e-4)
        assert [i for i, _ in entry.top] == np.argsort(-logprobs[place], kind="stable")[:3].tolist()


def test_towers_run_for_a_chunk_at_a_time(media_engine, monkeypatch):
    """A prompt of many pictures must not keep the others waiting for all of them."""
    seen, original = [], media_engine._programs.prefill

    def prefill(*args):
        seen.append(media_engine._towers.misses)
        return original(*args)

    monkeypatch.setattr(media_engine._programs, "prefill", prefill)
    before = media_engine._towers.misses
    pictures = with_media(*(picture(10, 100 + i, 16 * i) for i in range(6)), length=96)
    assert next(iter(media_engine.generate([pictures]))).finish_reason == "length"
    # Drafting looks two tokens further: at the next chunk's picture.
    assert [count - before for count in seen] == [2, 3, 4, 5, 6, 6]


def test_a_tower_that_fails_loses_its_request_alone(media_engine, monkeypatch):
    def failing(kind, rows):
        raise MemoryError("no room for patches")

    text, pictured = Request("text", prompt(50), GREEDY), with_media(picture(20, 200, 30), length=60)
    expected = next(iter(media_engine.generate([text]))).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(media_engine._towers, "_embed", failing)
        done = {one.request_id: one for one in media_engine.generate([text, pictured])}
    lost = done[pictured.request_id]
    assert (lost.finish_reason, lost.token_ids) == ("error", ())
    assert lost.error == "the pictures or sound could not be read: no room for patches"
    assert done["text"].token_ids == expected
    assert media_engine.stats().kv_pages_used == 0
    assert next(iter(media_engine.generate([pictured]))).finish_reason == "length"


def test_pc01_another_picture_gives_another_answer(media_engine):
    a, b = (with_media(picture(40, seed, 5)) for seed in (1, 2))
    outs = [next(iter(media_engine.generate([request]))).token_ids for request in (a, b, a)]
    assert outs[0] == outs[2] != outs[1]


@pytest.mark.parametrize(
    "change, sentence",
    {
        "one placeholder too many": (
            lambda r: dataclasses.replace(r, prompt_token_ids=(*r.prompt_token_ids, IMAGE)),
            "41 image placeholders",
        ),
        "one too few": (
            lambda r: dataclasses.replace(r, prompt_token_ids=(*r.prompt_token_ids[:44], 3, *r.prompt_token_ids[45:])),
            "not as many placeholders",
        ),
        "shifted": (lambda r: dataclasses.replace(r, media=(picture(40, 1, 6),)), "not as many placeholders"),
        "no rows": (lambda r: dataclasses.replace(r, media=(picture(0, 1, 5),)), "1 or more"),
        "no media": (lambda r: dataclasses.replace(r, media=()), "40 image placeholders"),
        "sound for pictures": (lambda r: dataclasses.replace(r, media=(clip(40, 1, 5),)), "not as many placeholders"),
        "other patches": (
            lambda r: dataclasses.replace(r, media=(Media("image", np.ones((40, 2, 8, 8, 3), np.float32), 5),)),
            "rows must be",
        ),
        "not finite": (
            lambda r: dataclasses.replace(r, media=(Media("image", np.full((40, 2, 4, 4, 3), np.nan, np.float32), 5),)),
            "finite",
        ),
        "too large": (
            lambda r: dataclasses.replace(r, media=(Media("image", np.full((40, 2, 4, 4, 3), 3e38, np.float32), 5),)),
            "at most 1e",
        ),
        "bins out of range": (
            lambda r: with_media(Media("audio", np.full((4, 8), 4, np.uint8), 5)),
            r"bins must be 0\.\.3",
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_im09_what_does_not_fit_is_refused(media_engine, change, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        next(iter(media_engine.generate([change(MEDIA["a picture over chunk borders"])])))


def test_a_model_without_towers_takes_no_media():
    engine = Engine(tiny_inkling(), CONFIG)
    with pytest.raises(InvalidRequest, match="reads no image"):
        engine._check(MEDIA["a picture over chunk borders"])


def test_mo07_padded_rows_are_never_sampled(model):
    """Rows past the kept vocabulary would win every time, if they were seen."""
    weight = model.unembed.weight[...]
    huge = weight.at[150:].set(100 * jnp.sign(weight[150:]))
    leaves, treedef = jax.tree.flatten(model)
    changed = jax.tree.unflatten(treedef, [huge if leaf is weight else leaf for leaf in leaves])
    assert changed.unembed.weight[...] is huge
    work = [Request(str(n), prompt(n), SamplingParams(seed=n, temperature=3.0, max_tokens=20)) for n in (3, 20)]
    done, expected = answers(changed, CONFIG, work), answers(model, CONFIG, work)
    assert max(max(one.token_ids) for one in done.values()) < 150
    assert {i: one.token_ids for i, one in done.items()} == {i: one.token_ids for i, one in expected.items()}
