"""Inkling through a real gateway: smg prepares pictures and sound, and sends them over TokenSpeedScheduler."""

import base64
import json
import threading

import ml_dtypes
import numpy as np
import openai
import pytest
from gateway import gateway
from grpc_harness import Harness
from inkling_folder import write_inkling
from media_samples import image_file, picture, sound, sound_file

from serve.media.audio import audio_frames
from serve.media.image import image_patches

MODEL = "served-name"
PARSERS = ("--reasoning-parser", "inkling", "--tool-call-parser", "inkling")


@pytest.fixture(scope="module")
def harness(loop, inkling_model):
    folder, settings = inkling_model
    with Harness(loop, folder, step_seconds=0.001, **settings) as harness:
        yield harness


@pytest.fixture(scope="module")
def client(harness, tmp_path_factory):
    with gateway(harness.server.address, MODEL, tmp_path_factory.mktemp("gateway") / "log", *PARSERS) as client:
        yield client


def image_part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def audio_part(data: bytes) -> dict:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def chat(client, *parts, **options):
    options = {"max_tokens": 3} | options
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": list(parts)}], **options)


def test_im10_au08_pictures_and_sound_arrive_in_their_order(client, harness):
    first, second, clip = picture(170, 100), picture(39, 41), sound(0.42)
    wav = sound_file(clip)
    chat(
        client,
        text_part("A"),
        image_part(image_file(first)),
        audio_part(wav),
        image_part(image_file(second)),
        text_part("B"),
    )
    arrived = harness.engine.submitted[-1]
    image, audio = "<|unused_200054|>", "<|unused_200053|>"
    assert harness.decode(arrived.prompt_token_ids) == (
        "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
        "<|message_user|><|content_text|>A<|end_message|>"
        f"<|message_user|><|content_image|>{image * 15}<|end_message|>"
        f"<|message_user|><|content_audio_input|>{audio * 9}<|audio_end|><|end_message|>"
        f"<|message_user|><|content_image|>{image * 2}<|end_message|>"
        "<|message_user|><|content_text|>B<|end_message|>"
        "<|message_model|>"
    )
    assert [media.kind for media in arrived.media] == ["image", "audio", "image"]
    for media, expected in zip(arrived.media, (first, wav, second), strict=True):
        if media.kind == "audio":
            np.testing.assert_array_equal(media.rows, audio_frames(expected, harness.model.media_format))
        else:
            patches = image_patches(expected, harness.model.media_format)
            assert media.rows.shape == patches.shape
            # The gateway rounds pixels to bfloat16; a value between two of them may go to either.
            np.testing.assert_allclose(media.rows, patches.astype(ml_dtypes.bfloat16).astype(np.float32), rtol=2**-7)


def test_im05_broken_files_are_400_and_others_go_on(client, harness):
    good: list[str] = []

    def stream() -> None:
        events = chat(client, image_part(image_file(picture())), text_part("go on"), max_tokens=400, stream=True)
        good.extend(event.choices[0].finish_reason or "" for event in events if event.choices)

    running = threading.Thread(target=stream)
    running.start()
    png, wav = image_file(picture()), sound_file(sound(1))
    before = len(harness.engine.submitted)
    for part in (
        image_part(b""),
        image_part(png[: len(png) // 2]),
        image_part(b"hello"),
        audio_part(b""),
        audio_part(wav[:20]),
        audio_part(png),
    ):
        with pytest.raises(openai.BadRequestError):
            chat(client, part)
    running.join()
    assert good[-1] == "length"
    assert all(request.sampling.max_tokens == 400 for request in harness.engine.submitted[before:])
    assert chat(client, image_part(png)).choices[0].finish_reason == "length"
    harness.wait_idle()


def test_text_streamed_with_usage_and_stop_strings(client):
    stream = chat(client, text_part("x"), max_tokens=6, stream=True, seed=2, stream_options={"include_usage": True})
    events = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "Thinki"
    assert next(event.usage for event in events if event.usage).completion_tokens == 6
    for streamed in (False, True):
        answer = chat(client, text_part("x"), max_tokens=60, seed=2, stop=["effort"], stream=streamed)
        if streamed:
            events = [event.choices[0] for event in answer if event.choices]
            text, reason = (
                "".join(e.delta.content or "" for e in events),
                next(e.finish_reason for e in events if e.finish_reason),
            )
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (text, reason) == ("Thinking ", "stop")


def test_gr02_client_that_hangs_up_frees_its_slot(client, harness):
    stream = chat(client, image_part(image_file(picture())), max_tokens=3000, stream=True)
    next(iter(stream))
    stream.close()
    harness.wait_idle(1.5)


def test_im06_the_gateway_follows_the_checkpoint_s_settings(loop, tmp_path):
    media_format, end = write_inkling(tmp_path)
    settings = {"rescale_image_frac": 2.0, "rescale_image_max_upscaled_long_edge": 300}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    media_format = type(media_format)(
        media_format.image_token_id, media_format.audio_token_id, image=type(media_format.image).read(tmp_path)
    )
    with (
        Harness(loop, tmp_path, media_format=media_format, eos_token_ids=(end,)) as harness,
        gateway(harness.server.address, MODEL, tmp_path / "log", *PARSERS) as client,
    ):
        for size, resized in (((100, 60), (200, 120)), ((200, 100), (300, 150)), ((400, 40), (400, 40))):
            source = picture(*size)
            chat(client, image_part(image_file(source)))
            (media,) = harness.engine.submitted[-1].media
            expected = image_patches(source, media_format)
            assert len(media.rows) == len(expected) == -(-resized[1] // 40) * (resized[0] // 40 + 1)
            np.testing.assert_allclose(media.rows, expected, atol=0.04)  # two levels of 255, and bfloat16
