"""The tiny Inkling's corpus: seeded, split cleanly, and rendered exactly as the server renders a request."""

import io
import wave
from itertools import islice
from random import Random

import numpy as np
import PIL.Image
import pytest

from checkpoints.training.inkling.corpus import ALL_KINDS, Asked, draw, stream
from checkpoints.training.inkling.evaluate import accepted_by_round
from checkpoints.training.inkling.pack import held_out_batches, pack, training_batch
from checkpoints.training.inkling.pictures import SHAPES, draw_picture, mask
from checkpoints.training.inkling.render import encode, loaded, media_format, tower_rows
from checkpoints.training.inkling.shape import config
from checkpoints.training.inkling.sights import MEDIA_KINDS, is_held_out
from checkpoints.training.inkling.tokenizer import CHECKPOINT, KEPT_VOCAB_SIZE, SPECIAL, load_tokenizer, token_id
from checkpoints.training.inkling.tones import NOTES, draw_tone
from serve.media.content import load_media
from serve.text import inkling_tokens as names
from serve.text.chat_template import encode_chat
from serve.text.inkling import parse, state_after
from serve.text.load import load_tokenizer as load_served

TEMPLATE = (CHECKPOINT.parent / "training" / "inkling" / "chat_template.jinja").read_text()


def test_same_seed_same_corpus():
    first, again, other = ([encode(c).ids.tolist() for c in islice(stream(seed), 100)] for seed in (3, 3, 4))
    assert first == again
    assert first != other
    a, b = training_batch(0, 7, 2, 512), training_batch(0, 7, 2, 512)
    assert (a.tokens == b.tokens).all()
    assert (a.patches == b.patches).all()
    assert len(a.patch_at[a.patch_at < 1024])


def test_tokenizer_has_the_published_control_tokens_and_fills_the_kept_vocabulary():
    assert SPECIAL.index(names.USER) < SPECIAL.index(names.MODEL)
    assert set(names.NAMES.values()) | set(names.PLACEHOLDERS.values()) == set(SPECIAL)
    ids = load_tokenizer().get_vocab()
    assert [ids[name] for name in SPECIAL] == list(range(len(SPECIAL)))
    assert len(ids) == KEPT_VOCAB_SIZE == config().kept_vocab_size < config().vocab_size


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_prompts_and_answers_are_the_servers(kind):
    """Token for token what the server makes of the request, and the parser finds the answer in what is learned."""
    served, rng = load_served(CHECKPOINT), Random(kind)
    for _ in range(3):
        conversation = draw(rng, kind=kind)
        item = encode(conversation)
        messages, media = loaded(conversation.messages)
        options = dict(template=TEMPLATE, reasoning_effort=conversation.effort)
        prompt = encode_chat(served, messages, conversation.tools, **options)
        assert item.ids[: item.start].tolist() == prompt
        assert item.produced[item.start :].all()
        answer = item.ids[item.start :].tolist()
        assert answer.count(token_id(names.END_TURN)) == 1 and answer[-1] == token_id(names.END_TURN)
        assert [len(rows) for _, rows in media] == [
            length for _, length in _runs(item.ids, set(media_format_ids().values()))
        ]
        parsed = parse(
            served.decode(answer, skip_special_tokens=False),
            special_token_ids=served.special_token_ids,
            state=state_after(prompt, served.special_token_ids),
        )
        assert (parsed.content or "") == conversation.content
        assert (parsed.reasoning or "") == (conversation.reasoning if conversation.effort != "none" else "")
        assert [call.name for call in parsed.tool_calls] == [name for name, _ in conversation.tool_calls]


def media_format_ids() -> dict[str, int | None]:
    return {"image": media_format().image_token_id, "audio": media_format().audio_token_id}


def _runs(ids: np.ndarray, wanted: set) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for before, token in zip([-1, *ids.tolist()], ids.tolist(), strict=False):
        if token in wanted:
            runs = [*runs[:-1], (token, runs[-1][1] + 1)] if before == token else [*runs, (token, 1)]
    return runs


def test_thinking_follows_the_effort():
    for conversation in islice(stream(5), 200):
        thinks = token_id(names.THINKING) in encode(conversation).ids[encode(conversation).start :]
        assert thinks == (conversation.effort != "none")


def test_history_without_its_thinking_is_not_learned():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    conversation = Asked("x", [*messages, messages[0]], "No", "I think.")
    for effort, learned in (("high", False), ("none", True)):
        conversation.effort, conversation.enable_thinking = effort, effort != "none"
        item = encode(conversation)
        assert item.produced[: item.start - 1].any() == learned


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_held_out_media_are_never_trained_on(kind):
    rng = Random(0)
    for held in (False, True):
        for _ in range(5):
            messages = draw(rng, held, kind).messages
            parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
            media = [part.get("image", part.get("audio")) for part in parts if part["type"] != "text"]
            assert media
            assert all(is_held_out(array) == held for array in media)


def test_files_of_the_media_give_the_rows_that_were_trained_on():
    rng = Random(1)
    picture, tone = draw_picture(rng).pixels, draw_tone(rng).samples
    png, wav = io.BytesIO(), io.BytesIO()
    PIL.Image.fromarray(picture).save(png, "PNG")
    with wave.open(wav, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(tone.tobytes())
    parts = [{"type": "image", "image": png.getvalue()}, {"type": "audio", "audio": wav.getvalue()}]
    _, (image, audio) = load_media([{"role": "user", "content": parts}], media_format(), max_tokens=999)
    np.testing.assert_array_equal(image.rows, tower_rows({"type": "image", "image": picture}))
    np.testing.assert_array_equal(audio.rows, tower_rows({"type": "audio", "audio": tone}))


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_differ(shape):
    area = mask(shape, 48, 48, 24, 24, 20)
    assert 0.1 < area.mean() < 0.6
    for other in set(SHAPES) - {shape}:
        assert (area != mask(other, 48, 48, 24, 24, 20)).mean() > 0.05


def test_a_tone_is_loudest_at_a_harmonic_of_its_note():
    rng = Random(2)
    for _ in range(30):
        tone = draw_tone(rng)
        spectrum = np.abs(np.fft.rfft(tone.samples * np.hanning(len(tone.samples)), 1 << 17))
        loudest = spectrum.argmax() * 16000 / (1 << 17)
        wanted = 440 * 2 ** ((NOTES.index(tone.note) - 9) / 12)
        steps = [12 * np.log2(loudest / wanted / k) for k in (1, 2, 3)]
        assert min(abs(step - 12 * round(step / 12)) for step in steps) < 0.2


def test_packing_keeps_every_conversation_whole_and_its_media_with_it():
    items = [(c.kind, encode(c)) for c in islice(stream(9), 30)]
    items = [(kind, item) for kind, item in items if len(item.ids) <= 512]
    packed, left = pack(items, 8, 512)
    assert len(packed.last) + len(left) == len(items)
    ids = {names.PLACEHOLDERS["image"]: packed.patch_at, names.PLACEHOLDERS["audio"]: packed.frame_at}
    for name, places in ids.items():
        here = places[places < packed.tokens.size]
        assert sorted(here) == np.flatnonzero(packed.tokens.reshape(-1) == token_id(name)).tolist()
    whole = {(kind, item.ids.tobytes()): item for kind, item in items}
    for (row, start, end), kind in packed.last.items():
        places = np.flatnonzero(packed.segments[row] == packed.segments[row, start])
        assert places[-1] + 1 == end
        item = whole[kind, packed.tokens[row, places].tobytes()]
        assert start - places[0] == item.start
        assert (packed.produced[row, places] == item.produced).all()


def test_held_out_batches_hold_every_kind():
    batches = held_out_batches(1, 4, 1024)
    assert sorted(kind for packed in batches for kind in packed.last.values()) == sorted(ALL_KINDS)


@pytest.mark.parametrize(
    "wrong, rounds",
    [
        ([], [2, 2, 2]),
        ([(0, 4)], [2, 0, 2, 2]),
        ([(1, 4)], [2, 1, 2, 1]),
        ([(1, 1)], [1, 2, 2, 1]),
        ([(0, 5)], [2] * 3),
    ],
)
def test_accepted_by_round(wrong, rounds):
    """Depth n at place p drafts the token at p + n + 2; a round accepts up to the first wrong draft."""
    tokens = np.arange(100, 112)  # of which the last 10 are produced
    drafts = np.stack([np.append(tokens[n + 2 :], [0] * (n + 2)) for n in range(2)])
    for depth, place in wrong:
        drafts[depth, place] = 1
    assert accepted_by_round(tokens, drafts, 2) == rounds
