"""Media in chat messages, and their places among the tokens."""

import base64
import sys

import numpy as np
import pytest
from media_samples import FORMAT, image_file, picture, sound, sound_file

from serve.media.audio import audio_frames
from serve.media.content import MediaItem, load_media
from serve.media.errors import UnusableMedia
from serve.media.format import MediaFormat
from serve.media.image import image_patches
from serve.media.place import place, placeholder_runs
from serve.text.request_messages import has_media, media_parts

PNG, WAV = image_file(picture()), sound_file(sound(0.2))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"


def user(*parts) -> list:
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict:
    return {"type": "text", "text": words}


IMAGE_PARTS = [
    {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "high"}},
    {"type": "image_url", "image_url": data_url(PNG)},
    {"type": "image", "image": PNG},
    {"type": "image", "image": picture()},
    {"type": "image", "image": data_url(PNG)},
]
AUDIO_PARTS = [
    {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": data_url(WAV, "audio/wav")}},
    {"type": "audio", "audio": WAV},
]


@pytest.mark.parametrize("part", IMAGE_PARTS + AUDIO_PARTS)
def test_every_kind_of_part(part):
    messages, (item,) = load_media(user(text("See:"), part), FORMAT, max_tokens=100)
    expected = image_patches(PNG, FORMAT) if item.kind == "image" else audio_frames(WAV, FORMAT)
    assert item.kind in part["type"]
    np.testing.assert_array_equal(item.rows, expected)
    assert messages == user(text("See:"), {"type": item.kind, "num_tokens": len(expected)})
    assert part in IMAGE_PARTS + AUDIO_PARTS  # the message given is as it was


def test_files_only_where_they_are_allowed(tmp_path):
    (path := tmp_path / "a picture.png").write_bytes(PNG)
    for url in (str(path), path.as_uri()):
        messages = user({"type": "image_url", "image_url": {"url": url}})
        assert len(load_media(messages, FORMAT, max_tokens=100, allow_files=True)[1]) == 1
        with pytest.raises(UnusableMedia, match="not read by URL"):
            load_media(messages, FORMAT, max_tokens=100)
    assert load_media(user({"type": "image", "image": path}), FORMAT, max_tokens=100)[1]  # no stranger can send a Path
    with pytest.raises(UnusableMedia, match="no image file"):
        load_media(user({"type": "image", "image": "absent.png"}), FORMAT, max_tokens=100, allow_files=True)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "Nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "not of the form"),
        ({"type": "image_url"}, "part is empty"),
        ({"type": "image_url", "image_url": {}}, "part is empty"),
        ({"type": "audio", "audio": 0}, "holds a int"),  # not the process's standard input
        ({"type": "input_audio", "input_audio": {"data": 5}}, "not base64"),
        ({"type": "input_audio", "input_audio": {"data": encoded(PNG)}}, "is not a WAV"),
        ({"type": "image", "image": WAV}, "none of PNG"),
    ],
)
def test_im05_parts_that_cannot_be_read_are_named_by_their_place(part, says):
    with pytest.raises(UnusableMedia, match=rf"^messages\[1\].content\[2\]: .*{says}"):
        load_media([{"role": "system", "content": "x"}, *user(text("a"), text("b"), part)], FORMAT, max_tokens=99)


def test_a_type_that_is_no_name_is_left_to_the_template():
    messages = user({"type": ["image"], "image": PNG, "num_tokens": 3}, {"type": {}, "audio": WAV}, text("a"))
    assert not has_media(messages)
    assert media_parts(messages) == []
    assert load_media(messages, FORMAT, max_tokens=99) == (messages, ())


def test_a_model_without_a_tower_says_so():
    with pytest.raises(UnusableMedia, match="reads no audio"):
        load_media(user(AUDIO_PARTS[0]), MediaFormat(1, None), max_tokens=99)


def test_media_beyond_the_context_are_refused_as_they_come():
    part = IMAGE_PARTS[0]
    assert load_media(user(part, part), FORMAT, max_tokens=12)[1]
    with pytest.raises(UnusableMedia, match="the media are 12 tokens; the context has 11"):
        load_media(user(part, part, {"type": "image"}), FORMAT, max_tokens=11)


def test_im10_media_of_all_turns_keep_their_order():
    other = {"type": "image", "image": picture(40, 40)}
    messages = [
        {"role": "system", "content": [IMAGE_PARTS[0], text("rules")]},
        {"role": "user", "content": [text("a"), AUDIO_PARTS[0], text("b"), other]},
        {"role": "assistant", "content": "c", "tool_calls": []},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "user", "content": [AUDIO_PARTS[2], other, text("d")]},
    ]
    loaded, items = load_media(messages, FORMAT, max_tokens=99)
    assert [item.kind for item in items] == ["image", "audio", "image", "audio", "image"]
    counts = [
        part["num_tokens"]
        for m in loaded
        if isinstance(m.get("content"), list)
        for part in m["content"]
        if "num_tokens" in part
    ]
    assert counts == [len(item.rows) for item in items] == [6, 4, 2, 4, 2]
    assert loaded[2:4] == messages[2:4]

    image, audio = FORMAT.image_token_id, FORMAT.audio_token_id
    prompt, offsets = [7], []
    for item in items:
        offsets.append(len(prompt) + 1)
        prompt += [9, *[image if item.kind == "image" else audio] * len(item.rows), 8]
    placed = place(prompt, items, image, audio)
    assert [media.offset for media in placed] == offsets
    assert all(media.rows is item.rows and media.kind == item.kind for media, item in zip(placed, items, strict=True))


def item(kind, rows: int) -> MediaItem:
    return MediaItem(kind, np.ones((rows, 80), np.uint8))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, 1, 1, 1, 9, 2, 2], "has 3 rows, but 4 placeholders"),
        ([1, 1, 9, 2, 2], "has 3 rows, but 2 placeholders"),
        ([1, 1, 1, 2, 2, 2], "has 2 rows, but 3 placeholders"),
        ([1, 1, 1, 9], "placeholders for 1 pictures and clips, and 2 came"),
        ([9], "placeholders for 0"),
        ([1, 1, 1, 9, 2, 2, 9, 1], "placeholders for 3"),
        ([2, 2, 9, 1, 1, 1], "is image, but its placeholders in the prompt are audio"),
    ],
)
def test_im09_mismatches_are_refused_never_shifted(prompt, says):
    items = (item("image", 3), item("audio", 2))
    assert [media.offset for media in place([1, 1, 1, 9, 2, 2], items, 1, 2)] == [0, 4]
    with pytest.raises(UnusableMedia, match=says):
        place(prompt, items, 1, 2)


def test_im09_a_picture_without_tokens_is_refused():
    with pytest.raises(UnusableMedia, match="for 1 pictures and clips, and 2 came"):
        place([9, 1, 1, 1, 9], (item("image", 0), item("image", 3)), 1, 2)


def test_placeholder_runs():
    assert placeholder_runs([], 1, 2) == [] == placeholder_runs([5, 6], 1, 2)
    assert placeholder_runs([1, 1, 2, 5, 5, 2, 1], 1, 2) == [(1, 0, 2), (2, 2, 1), (2, 5, 1), (1, 6, 1)]
    assert place([1, 3, 3], (item("image", 1),), 1, None)[0].offset == 0


@pytest.mark.parametrize(("missing", "part"), [("PIL", IMAGE_PARTS[0]), ("soundfile", AUDIO_PARTS[0])])
def test_without_the_libraries_a_sentence_says_what_to_install(monkeypatch, missing, part):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UnusableMedia, match=r"install firesteel\[media\]"):
        load_media(user(part), FORMAT, max_tokens=99)
