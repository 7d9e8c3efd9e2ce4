"""Pictures and sound in Generate calls of both protocols: what arrives, and what is refused."""

import threading
import time

import grpc
import ml_dtypes
import numpy as np
import pytest
from grpc_harness import Harness
from media_messages import MODALITIES, fill, frames, patches, tokenspeed, vllm
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc

from serve.media.format import MediaFormat
from serve.request import Media

Status = grpc.StatusCode
IMAGE, AUDIO, MARKER, SOUND_MARKER, END = 312, 311, 263, 278, 268  # ids of the toy vocabulary


def test_the_toy_vocabulary_is_as_written_here(inkling):
    specials = inkling.tokenizer.special_token_ids
    names = (
        "<|unused_200054|>",
        "<|unused_200053|>",
        "<|content_image|>",
        "<|content_audio_input|>",
        "<|end_message|>",
    )
    assert [specials[name] for name in names] == [IMAGE, AUDIO, MARKER, SOUND_MARKER, END]
    assert inkling.model.media_format.image_token_id == IMAGE and inkling.model.media_format.audio_token_id == AUDIO


def send(harness, message):
    """The request as it reached the engine."""
    stub = harness.tokenspeed if type(message).__module__.startswith("tokenspeed") else harness.stub
    before = len(harness.engine.submitted)
    list(stub.Generate(message, timeout=10))
    assert len(harness.engine.submitted) == before + 1
    return harness.engine.submitted[-1]


def refused(harness, message) -> grpc.RpcError:
    stub = harness.tokenspeed if type(message).__module__.startswith("tokenspeed") else harness.stub
    before = len(harness.engine.submitted)
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(message, timeout=10))
    assert len(harness.engine.submitted) == before
    harness.wait_idle()
    return error.value


def same(media: Media, kind: str, rows: np.ndarray, offset: int) -> bool:
    expected_type = np.float32 if kind == "image" else np.uint8
    return (
        (media.kind, media.offset, media.rows.dtype) == (kind, offset, expected_type)
        and np.array_equal(media.rows, rows)
        and {"is_finite", "content_hash"} <= vars(media).keys()  # known before the event loop and the engine ask
        and media.content_hash == Media(media.kind, rows, 0).content_hash
    )


PROMPT = [7, MARKER, *[IMAGE] * 3, END, SOUND_MARKER, *[AUDIO] * 2, 9, END, MARKER, IMAGE, END]


def test_im10_au08_tokenspeed_items_arrive_at_their_places(inkling):
    first, clip, second = patches(3), frames(2), patches(1, seed=1)
    items = [("image", first, (2, 3)), ("audio", clip, (7, 2)), ("image", second, (12, 1))]
    for order in ((0, 1, 2), (2, 0, 1)):  # whatever order they are sent in
        arrived = send(inkling, tokenspeed(PROMPT, [items[i] for i in order], max_new_tokens=1))
        assert arrived.prompt_token_ids == tuple(PROMPT) and len(arrived.media) == 3
        assert same(arrived.media[0], "image", first, 2)
        assert same(arrived.media[1], "audio", clip, 7)
        assert same(arrived.media[2], "image", second, 12)


def test_im10_au08_vllm_batches_arrive_at_their_places(inkling):
    first, clip, second = patches(3), frames(2), patches(1, seed=1)
    batches = [("image", [first, second], [(1, 4), (11, 2)]), ("audio", [clip], [(6, 3)])]  # openers counted in
    arrived = send(inkling, vllm(PROMPT, batches, max_tokens=1))
    assert arrived.prompt_token_ids == tuple(PROMPT)
    assert same(arrived.media[0], "image", first, 2)
    assert same(arrived.media[1], "audio", clip, 7)
    assert same(arrived.media[2], "image", second, 12)


@pytest.mark.parametrize("opener", [0, 1])
@pytest.mark.parametrize("with_sizes", [True, False])
def test_vllm_sizes_come_from_the_request_or_the_places(inkling, opener, with_sizes):
    first, second = patches(3), patches(1, seed=1)
    prompt = [MARKER, *[IMAGE] * 3, END, MARKER, IMAGE, END]
    message = vllm(
        prompt, [("image", [first, second], [(1 - opener, 3 + opener), (6 - opener, 1 + opener)])], max_tokens=1
    )
    if not with_sizes:
        message.mm_inputs.model_specific_tensors.clear()
        message.mm_inputs.flat_keys.clear()
    arrived = send(inkling, message)
    assert same(arrived.media[0], "image", first, 1) and same(arrived.media[1], "image", second, 6)


def test_items_without_places_take_the_model_s_own_placeholders_in_order(inkling):
    items = [("image", patches(3), None), ("audio", frames(2), None), ("image", patches(1), None)]
    for message in (
        tokenspeed(PROMPT, items, max_new_tokens=1),
        vllm([7, MARKER, *[IMAGE] * 3, END], [("image", [patches(3)], None)], max_tokens=1),
    ):
        arrived = send(inkling, message)
        assert [media.offset for media in arrived.media] == [2, 7, 12][: len(arrived.media)]


def test_a_gateway_s_own_fill_becomes_the_model_s_placeholders(inkling):
    """Fill that repeats the opening token, and the chat template's one placeholder left standing behind it."""
    rows, clip = patches(3), frames(2)
    prompt = [7, MARKER, *[MARKER] * 3, IMAGE, END, SOUND_MARKER, *[281] * 2, AUDIO, 9, END]
    expected = (7, MARKER, *[IMAGE] * 3, END, SOUND_MARKER, *[AUDIO] * 2, 9, END)
    arrived = send(inkling, tokenspeed(prompt, [("image", rows, (2, 3)), ("audio", clip, (8, 2))], max_new_tokens=1))
    assert arrived.prompt_token_ids == expected
    assert same(arrived.media[0], "image", rows, 2) and same(arrived.media[1], "audio", clip, 7)
    arrived = send(inkling, vllm(prompt[:7], [("image", [rows], [(1, 4)])], max_tokens=1))
    assert arrived.prompt_token_ids == expected[:6] and same(arrived.media[0], "image", rows, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pixel_types(inkling, dtype):
    rows = patches(2).astype(dtype)
    arrived = send(inkling, tokenspeed([MARKER, IMAGE, IMAGE], [("image", rows, (1, 2))], max_new_tokens=1))
    assert same(arrived.media[0], "image", rows.astype(np.float32), 1)


def test_pc01_media_of_all_outputs_are_the_same_objects(inkling):
    before = len(inkling.engine.submitted)
    list(inkling.tokenspeed.Generate(tokenspeed([IMAGE, 5], [("image", patches(1), (0, 1))], n=3, max_new_tokens=1)))
    arrived = inkling.engine.submitted[before:]
    assert len(arrived) == 3 and arrived[0].media[0] is arrived[2].media[0]


def without(field: str):
    message = tokenspeed([IMAGE], [("image", patches(1), (0, 1))])
    message.mm_inputs.items[0].ClearField(field)
    return message


def two_places():
    message = tokenspeed([IMAGE, 5, IMAGE], [("image", patches(2), (0, 1))])
    message.mm_inputs.items[0].placeholders.add(offset=2, length=1)
    return message


def cut_data():
    message = without("model_specific_tensors")
    message.mm_inputs.items[0].encoder_input.inline = b"1234"
    return message


def elsewhere():
    message = without("model_specific_tensors")
    message.mm_inputs.items[0].encoder_input.shm.name = "/x"
    return message


def of_type(dtype: str):
    message = without("model_specific_tensors")
    message.mm_inputs.items[0].encoder_input.dtype = dtype
    return message


def of_shape(*shape: int):
    message = without("model_specific_tensors")
    message.mm_inputs.items[0].encoder_input.shape[:] = shape
    if not all(shape):
        message.mm_inputs.items[0].encoder_input.inline = b""
    return message


def hashes(count: int):
    message = vllm([IMAGE], [("image", [patches(1)], [(0, 1)])])
    message.mm_inputs.mm_hashes.extend(["x"] * count)
    return message


def sizes(*values: int):
    message = vllm([IMAGE], [("image", [patches(1)], None)])
    fill(message.mm_inputs.model_specific_tensors["tokens_per_item"], np.int64([]))
    message.mm_inputs.model_specific_tensors["tokens_per_item"].Clear()
    fill(message.mm_inputs.model_specific_tensors["tokens_per_item"], np.int64(values))
    return message


def without_pixels():
    message = vllm([IMAGE], [("image", [patches(1)], [(0, 1)])])
    message.mm_inputs.ClearField("pixel_values")
    return message


def image(prompt, rows: int, offset: int, length: int):
    return tokenspeed(prompt, [("image", patches(rows), (offset, length))])


NAN = patches(1)
NAN[0, 1, 5, 5, 2] = np.nan


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (image([MARKER, *[IMAGE] * 3, END], 3, 1, 2), "3 rows, but 2 placeholders"),
        (image([MARKER, *[IMAGE] * 3, END], 3, 1, 5), "3 rows, but 5 placeholders"),
        (image([MARKER, *[IMAGE] * 3, END], 2, 1, 2), "not where its placeholders are"),  # one is left over
        (image([MARKER, *[IMAGE] * 3, END], 3, 2, 3), "not where its placeholders are"),
        (image([MARKER, *[MARKER] * 3, END], 3, 0, 3), "not where its placeholders are"),
        (image([MARKER, *[IMAGE] * 3, END], 3, 0, 3), "not where its placeholders are"),
        (image([MARKER, *[IMAGE] * 3], 3, 3, 3), "ends beyond the prompt of 4"),
        (image([IMAGE], 1, 2**32 - 1, 1), "ends beyond the prompt"),
        (image([IMAGE, 5, IMAGE], 1, 0, 1), "placeholders for 2 pictures and clips, and 1 came"),
        (tokenspeed([5, IMAGE]), "placeholders for 1 pictures and clips, and 0 came"),
        (vllm([5, AUDIO]), "placeholders for 1 pictures and clips, and 0 came"),
        (tokenspeed([IMAGE, 5], [("image", patches(1), (0, 1))] * 2), "overlaps another"),
        (tokenspeed([IMAGE, 5, AUDIO], [("image", patches(1), (0, 1)), ("audio", frames(1), None)]), "all or none"),
        (tokenspeed([IMAGE], [("image", patches(2)[:0], None)]), "has no rows"),
        (vllm([IMAGE], [("image", [patches(1), patches(1)], [(0, 1)])]), "2 items (image), but 1 mm_placeholders"),
        (hashes(2), "1 items (image), but 2 mm_hashes"),
        (sizes(2), "adds up to 2, but there are 1 rows"),
        (sizes(1, 0), "one row or more"),
        (sizes(-1, 2), "one row or more"),
        (without_pixels(), "no pixel_values"),
        (two_places(), "has 2 places"),
    ],
)
def test_im09_counts_and_places_that_do_not_fit_are_refused(inkling, message, says):
    error = refused(inkling, message)
    assert error.code() is Status.INVALID_ARGUMENT and says in error.details()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (without("encoder_input"), "no encoder_input"),
        (cut_data(), "has 4 bytes, which is not a float32 array of (1, 2, 40, 40, 3)"),
        (elsewhere(), "--multimodal-tensor-transport inline"),
        (of_type("float64"), "dtype 'float64'"),
        (of_shape(*[1] * 500_000, 4800), "has 500001 dimensions; at most 8"),
        (of_shape(0, *[2**32 - 1] * 4), "has no rows, or empty ones"),
        (tokenspeed([IMAGE], [("image", patches(1)[..., :39, :], (0, 1))]), "reads [rows, 2, 40, 40, 3]"),
        (tokenspeed([IMAGE], [("image", NAN, (0, 1))]), "not finite"),
        (tokenspeed([AUDIO], [("audio", frames(1)[:, :79], (0, 1))]), "reads [rows, 80]"),
        (tokenspeed([AUDIO], [("audio", np.full((1, 80), 16, np.uint8), (0, 1))]), "from 0 to 15"),
        (tokenspeed([AUDIO], [("audio", np.full((1, 80), 0.5, np.float32), (0, 1))]), "from 0 to 15"),
        (tokenspeed([AUDIO], [("audio", np.full((1, 80), np.nan, np.float32), (0, 1))]), "from 0 to 15"),
        (tokenspeed([IMAGE], [("video", patches(1), (0, 1))]), "Video is not read"),
        (vllm([IMAGE], [("image", [patches(1)], [(0, 1)])], truncate_prompt_tokens=1), "truncate_prompt_tokens"),
    ],
)
def test_im05_tensors_that_cannot_be_used_are_refused(inkling, message, says):
    error = refused(inkling, message)
    assert error.code() is Status.INVALID_ARGUMENT and says in error.details()


def many_places():
    message = vllm([IMAGE], [("image", [patches(1)], [(0, 1)])])
    message.mm_inputs.model_specific_tensors.clear()
    message.mm_inputs.pixel_values.shape[0] = 100_000
    del message.mm_inputs.mm_placeholders[:]
    for _ in range(100_000):
        message.mm_inputs.mm_placeholders.add(offset=0, length=1)
    return message


def many_items():
    message = tokenspeed([IMAGE], [("image", patches(1), (0, 1))])
    for _ in range(100_000):
        message.mm_inputs.items.add(modality=MODALITIES["image"]).encoder_input.dtype = "uint8"
    return message


def many_batches():
    message = vllm([IMAGE], [("image", [patches(1)], [(0, 1)])])
    for _ in range(100_000):
        message.extra_mm_inputs.add().pixel_values.shape.append(1)
    return message


@pytest.mark.parametrize("message", [many_places, many_items, many_batches])
def test_small_messages_that_name_very_many_media_are_refused(inkling, message):
    error = refused(inkling, message())
    assert error.code() is Status.INVALID_ARGUMENT and "1024" in error.details()


def test_a_model_without_sound_says_so(serving):
    harness = serving(load=False)
    harness.model.media_format = MediaFormat(image_token_id=IMAGE, audio_token_id=None)
    harness.load()
    error = refused(harness, tokenspeed([AUDIO], [("audio", frames(1), (0, 1))]))
    assert error.code() is Status.INVALID_ARGUMENT and "reads no audio" in error.details()


def test_text_models_take_no_media(loop, model_folder):
    with Harness(loop, model_folder, services=("vllm", "tokenspeed")) as harness:
        for message in (
            tokenspeed([IMAGE], [("image", patches(1), (0, 1))]),
            vllm([IMAGE], [("image", [patches(1)], [(0, 1)])]),
        ):
            error = refused(harness, message)
            assert error.code() is Status.UNIMPLEMENTED and "text only" in error.details()


def test_au06_calls_with_clips_of_different_length_at_once(inkling):
    """Two at a time, and two clips in one."""
    results = {}

    def ask(length: int) -> None:
        rows = frames(length, seed=length)
        message = tokenspeed([SOUND_MARKER, *[AUDIO] * length, END], [("audio", rows, (1, length))], max_new_tokens=2)
        results[length] = list(inkling.tokenspeed.Generate(message, timeout=10))[-1].complete.prompt_tokens

    threads = [threading.Thread(target=ask, args=(length,)) for length in (600, 1200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {600: 602, 1200: 1202}
    for request in inkling.engine.submitted[-2:]:
        (media,) = request.media
        assert same(media, "audio", frames(len(media.rows), seed=len(media.rows)), 1)
    prompt = [SOUND_MARKER, *[AUDIO] * 600, END, SOUND_MARKER, *[AUDIO] * 1200, END]
    both = [("audio", frames(600, seed=600), (1, 600)), ("audio", frames(1200, seed=1200), (603, 1200))]
    arrived = send(inkling, tokenspeed(prompt, both, max_new_tokens=1))
    assert [(media.offset, len(media.rows)) for media in arrived.media] == [(1, 600), (603, 1200)]


@pytest.mark.parametrize("megabytes", [5, 20, 100])
def test_gr05_pictures_of_many_megabytes_pass(inkling, megabytes):
    count = megabytes * 1_000_000 // (2 * 40 * 40 * 3 * 4)
    rows = np.zeros((count, 2, 40, 40, 3), np.float32)
    rows[:, 0, 0, 0, 0] = np.arange(count)
    options = (("grpc.max_send_message_length", -1),)
    stub = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(inkling.connect(*options))
    message = tokenspeed([MARKER, *[IMAGE] * count, END], [("image", rows, (1, count))], max_new_tokens=1)
    assert message.ByteSize() > 0.99e6 * megabytes
    list(stub.Generate(message, timeout=20))
    assert np.array_equal(inkling.engine.submitted[-1].media[0].rows, rows)


def test_gr05_pictures_beyond_the_limit_are_resource_exhausted(loop, inkling_model):
    folder, settings = inkling_model
    with Harness(loop, folder, max_message_mb=1, **settings) as harness:
        message = tokenspeed([*[IMAGE] * 27], [("image", patches(27), (0, 27))], max_new_tokens=1)  # 1.04 MB
        assert 1e6 < message.ByteSize() < 2**20
        list(harness.tokenspeed.Generate(message, timeout=10))
        message = tokenspeed([*[IMAGE] * 28], [("image", patches(28), (0, 28))], max_new_tokens=1)
        assert refused(harness, message).code() is Status.RESOURCE_EXHAUSTED


def test_large_pictures_do_not_hold_up_other_streams(inkling, monkeypatch):
    """Checking and hashing happen in a thread: the event loop answers meanwhile."""
    hashed = threading.Event()

    def slow(media: Media) -> str:
        time.sleep(0.5)
        hashed.set()
        return "hash"

    monkeypatch.setattr(Media, "content_hash", property(slow))
    call = inkling.tokenspeed.Generate(tokenspeed([IMAGE, 5], [("image", patches(1), (0, 1))], max_new_tokens=1))
    time.sleep(0.1)
    started = time.monotonic()
    list(inkling.stub.Generate(vllm([5], max_tokens=1), timeout=5))
    assert time.monotonic() - started < 0.3 and not hashed.is_set()
    list(call)
    assert hashed.is_set()
