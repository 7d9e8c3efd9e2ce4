"""Pictures: the reference's patches, what viewers show, sizes and limits, damage."""

import contextlib
import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from media_samples import FORMAT, image_file, picture
from PIL import Image

from serve.media import image as image_module
from serve.media.errors import UnusableMedia
from serve.media.format import ImageSettings, MediaFormat
from serve.media.image import image_patches, patch_grid, target_size

FIXTURE = Path(__file__).parents[2] / "fixtures" / "inkling-preprocess" / "expected.npz"
FILL = np.float32([-1.80686, -1.76710, -1.49444])


def pixels(source, width: int, height: int) -> np.ndarray:
    """The picture out of its patches again, on the scale 0..255."""
    rows, columns = patch_grid(width, height, FORMAT)
    patches = image_patches(source, FORMAT)
    np.testing.assert_array_equal(patches[:, 0], patches[:, 1])
    whole = patches[:, 0].reshape(rows, columns, 40, 40, 3).swapaxes(1, 2).reshape(rows * 40, columns * 40, 3)
    np.testing.assert_allclose(whole[height:], np.broadcast_to(FILL, whole[height:].shape), atol=1e-4)
    settings = ImageSettings()
    return (whole[:height, :width] * np.float32(settings.std) + np.float32(settings.mean)) * 255


@pytest.mark.parametrize("number", range(4))
def test_patches_are_the_reference_s(number):
    expected = np.load(FIXTURE)
    patches = image_patches(Image.fromarray(expected[f"image{number}"]), FORMAT)
    assert patches.dtype == np.float32
    np.testing.assert_allclose(patches, expected[f"patches{number}"], atol=1e-5)


@pytest.mark.parametrize(
    ("width", "height", "rescale", "patches"),
    [(640, 480, None, 204), (40, 40, None, 2), (1000, 1000, None, 650), (640, 480, 2.0, 792)],
)
def test_numbers_of_patches(width, height, rescale, patches):
    format = MediaFormat(1, 2, image=ImageSettings(rescale=rescale))
    assert np.prod(patch_grid(width, height, format)) == patches
    assert image_patches(picture(width, height), format).shape == (patches, 2, 40, 40, 3)


def test_missing_pixels_are_minus_one_before_scaling():
    patches = image_patches(picture(40, 40), FORMAT)
    np.testing.assert_allclose(patches[1, 0], np.broadcast_to(FILL, (40, 40, 3)), atol=1e-4)


def test_other_patch_sizes():
    assert image_patches(picture(20, 9), MediaFormat(1, 2, patch_size=8, temporal_patch_size=3)).shape == (
        6,
        3,
        8,
        8,
        3,
    )


def test_im01_exif_orientation():
    upright = picture(96, 48)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    for format in ("JPEG", "PNG"):
        found = pixels(image_file(turned, format, exif=exif, quality=95, subsampling=0), 96, 48)
        np.testing.assert_allclose(found, np.asarray(upright), atol=12 if format == "JPEG" else 1e-3)


def over_white(colour, alpha) -> np.ndarray:
    alpha = np.float32(alpha)[..., None] / 255
    return np.float32(colour) * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_im01_png_modes(mode):
    image = picture(50, 30, "RGBA" if mode in ("P", "RGBA") else "LA" if mode == "LA" else "L")
    image = {"P": lambda: image.convert("RGB").quantize(16), "1": lambda: image.convert("1")}.get(
        mode, lambda: image if mode != "RGB" else picture(50, 30)
    )()
    shown = np.asarray(image.convert("RGBA")).astype(np.float32)
    found = pixels(image_file(image), 50, 30)
    np.testing.assert_allclose(found, over_white(shown[..., :3], shown[..., 3]), atol=0.51 if "A" in mode else 1e-3)


def test_im01_transparent_colours_and_palettes():
    grey = np.uint8([[0, 10], [10, 200]])
    (black, ten), (_, light) = pixels(image_file(Image.fromarray(grey), transparency=10), 2, 2)
    np.testing.assert_allclose([black[0], ten[0], light[0]], [0, 255, 200], atol=1e-3)
    colours = np.uint8([[[1, 2, 3], [9, 8, 7]]])
    found = pixels(image_file(Image.fromarray(colours), transparency=(1, 2, 3)), 2, 1)
    np.testing.assert_allclose(found, [[[255, 255, 255], [9, 8, 7]]], atol=1e-3)
    palette = Image.fromarray(colours).quantize(2)
    transparent = palette.getpixel((1, 0))
    found = pixels(image_file(palette, transparency=transparent), 2, 1)
    np.testing.assert_allclose(found[0, 1], 255, atol=1e-3)
    assert found[0, 0, 0] < 20


def test_im01_sixteen_bit_grey():
    levels = np.uint16([[0, 128, 257, 32768, 65535]])
    found = pixels(image_file(Image.fromarray(levels)), 5, 1)
    np.testing.assert_allclose(found[0, :, 0], [0, 0, 1, 128, 255], atol=1e-3)


def test_im01_cmyk():
    cyan_ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    for source in (image_file(cyan_ink, "JPEG", quality=95), cyan_ink):
        np.testing.assert_allclose(pixels(source, 16, 16), np.broadcast_to([0, 255, 255], (16, 16, 3)), atol=3)


@pytest.mark.parametrize("format", ["WEBP", "GIF", "BMP"])
def test_other_formats_and_the_first_frame_of_animations(format, tmp_path):
    first = Image.new("RGB", (50, 30), (250, 20, 10))
    more = {} if format == "BMP" else {"save_all": True, "append_images": [Image.new("RGB", (50, 30), "blue")]}
    (tmp_path / "file").write_bytes(image_file(first, format, **more))
    np.testing.assert_allclose(pixels(tmp_path / "file", 50, 30)[5, 5], [250, 20, 10], atol=4)


def test_unknown_ranges_are_refused():
    for mode in ("F", "La"):
        with pytest.raises(UnusableMedia, match=f"type {mode}"):
            image_patches(picture(9, 9, "LA").convert(mode), FORMAT)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (3, 5000), (5000, 3)])
@pytest.mark.parametrize("rescale", [None, 2.0, 0.01])
def test_im03_extreme_sizes(size, rescale):
    format = MediaFormat(1, 2, image=ImageSettings(rescale=rescale))
    patches = image_patches(image_file(picture(*size)), format)
    width, height = target_size(*size, format.image)
    assert len(patches) == -(-height // 40) * (width // 40 + 1) and np.isfinite(patches).all()


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims many pixels, all black."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(1000), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_im04_claimed_sizes_are_refused_before_allocation(size):
    data = bomb(*size)
    tracemalloc.start()
    with pytest.raises(UnusableMedia, match="Make it smaller"):
        image_patches(data, FORMAT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) < 200 and peak < 5e6


def test_im04_the_limit_counts_patches_after_resizing(monkeypatch):
    monkeypatch.setattr(image_module, "MAX_PATCHES", 208)  # of 480 x 640: an orientation may turn it
    assert len(image_patches(picture(640, 480), FORMAT)) == 204
    with pytest.raises(UnusableMedia, match="800 patches"):
        image_patches(picture(640, 480), MediaFormat(1, 2, image=ImageSettings(rescale=2.0)))
    with pytest.raises(UnusableMedia, match="Make it smaller"):
        image_patches(picture(640, 481), FORMAT)


PNG = image_file(picture())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"hello", "none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (PNG[:20], "broken"),
        (PNG[: len(PNG) // 2], "broken"),
        (image_file(picture(), "JPEG")[:900], "broken"),
        (image_file(picture(), "WEBP")[:200], "broken"),
        (image_file(picture(), "TIFF"), "none of PNG"),
        (image_file(picture(), "PPM"), "none of PNG"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # files differ from run to run
)
def test_im05_what_is_no_picture_is_refused_with_a_reason(data, says):
    with pytest.raises(UnusableMedia, match=says):
        image_patches(data, FORMAT)


def test_im05_damage_is_refused_or_read_never_more():
    rng = np.random.default_rng(0)
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = image_file(picture(), format)
        for _ in range(25):
            damaged = bytearray(data)
            for position in rng.integers(0, min(len(data), 400), 6):
                damaged[position] = rng.integers(256)
            with contextlib.suppress(UnusableMedia):
                assert np.isfinite(image_patches(bytes(damaged), FORMAT)).all()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnusableMedia, match="no image file"):
        image_patches(tmp_path / "absent.png", FORMAT)


@pytest.mark.parametrize(
    ("edge", "rescale", "cap", "expected"),
    [
        (1500, 2.0, 2048, (2048, 956)),  # 956 = 700 * 2048 / 1500 = 955.73
        (3000, 2.0, 2048, (3000, 1400)),  # the cap only limits growth
        (1500, None, 2048, (1500, 700)),
        (1500, 2.0, None, (3000, 1400)),
        (1500, 0.5, 2048, (750, 350)),
        (3000, 0.25, 2048, (750, 350)),
    ],
)
def test_im06_long_edges(edge, rescale, cap, expected):
    settings = ImageSettings(rescale=rescale, max_long_edge=cap)
    size = (edge, edge * 7 // 15)
    assert target_size(*size, settings) == expected
    assert target_size(*size[::-1], settings) == expected[::-1]


def test_im06_sizes_round_half_up():
    assert target_size(5, 3, ImageSettings(rescale=0.5)) == (3, 2)
    assert target_size(200, 1, ImageSettings(rescale=0.01)) == (2, 1)


@pytest.mark.parametrize(("name", "nested"), [("processor_config.json", True), ("preprocessor_config.json", False)])
def test_im06_settings_come_from_the_checkpoint(tmp_path, name, nested):
    content = {
        "rescale_image_frac": 2.0,
        "rescale_image_max_upscaled_long_edge": 300,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [1, 1, 1],
        "patch_size": 40,
    }
    (tmp_path / name).write_text(json.dumps({"image_processor": content} if nested else content))
    settings = ImageSettings.read(tmp_path)
    assert settings == ImageSettings(2.0, 300, "BICUBIC", (0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    source = picture(100, 60)
    patches = image_patches(source, MediaFormat(1, 2, image=settings))
    resized = np.asarray(source.resize((200, 120), Image.Resampling.BICUBIC), np.float32)
    np.testing.assert_allclose(patches[0, 0], resized[:40, :40] / 255 - 0.5, atol=1e-6)


def test_im06_without_settings_nothing_is_resized(tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": {"feature_size": 80}}))
    assert ImageSettings.read(tmp_path) == ImageSettings() and ImageSettings().rescale is None
    lanczos = image_patches(picture(30, 30), MediaFormat(1, 2, image=ImageSettings(rescale=1.2)))
    resized = np.asarray(picture(30, 30).resize((36, 36), Image.Resampling.LANCZOS))
    np.testing.assert_allclose(
        lanczos[0, 0, :36, :36], (resized / 255 - ImageSettings().mean) / ImageSettings().std, atol=1e-5
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ('{"rescale_image_frac": 0}', "rescale_image_frac is 0"),
        ('{"resample": "LANCZOS"}', "resample"),
        ('{"image_std": [1, 1, 0]}', "image_std"),
        ('{"image_mean": [1, 1]}', "image_mean"),
    ],
)
def test_im06_unusable_settings_are_named(tmp_path, content, says):
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        ImageSettings.read(tmp_path)


def test_a_picture_that_is_a_file_object_s_is_turned_too():
    exif = Image.Exif()
    exif[0x0112] = 3
    image = Image.open(io.BytesIO(image_file(picture(), exif=exif)))
    np.testing.assert_array_equal(
        image_patches(image, FORMAT), image_patches(picture().transpose(Image.Transpose.ROTATE_180), FORMAT)
    )
