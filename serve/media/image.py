"""Pictures to the patches that Inkling reads: decoding, resizing, cutting, normalising (spec 7.2)."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serve.media.errors import UnusableMedia
from serve.media.format import ImageSettings, MediaFormat

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PATCHES = 16_384  # 26 megapixels at 40 x 40; 630 MB of patches
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
BACKGROUND = (255, 255, 255)  # behind transparent pixels, as viewers show them
_FILL = -1.0  # what is missing from the last patches, on the scale 0..255
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


def image_patches(source: bytes | Path | Image, format: MediaFormat) -> np.ndarray:
    """The patches of a picture, one for each token, row by row; a row has one patch more than its width needs.

    Pixels are as a viewer shows them: turned by the EXIF orientation, transparency over white, 16-bit grey scaled to
    8 bits, CMYK converted without colour profiles; of an animation the first frame. A picture may have 16,384
    patches; its header is asked first, so that a larger one is not decoded.

    Args:
        source: a PNG, JPEG, WebP, GIF or BMP file, its path, or a PIL image.
        format: what the model reads.

    Returns:
        [patches, temporal_patch_size, patch_size, patch_size, 3] float32: time, row, column, colour; normalised.

    Raises:
        UnusableMedia: no such picture, broken, too large, or of a pixel type without a known range.
    """
    pixels = _resized(_rgb(_open(source, format)), format.image)
    return _cut(pixels, format)


def patch_grid(width: int, height: int, format: MediaFormat) -> tuple[int, int]:
    """Rows and columns of patches of a picture of this size in pixels, before resizing."""
    width, height = target_size(width, height, format.image)
    return -(-height // format.patch_size), width // format.patch_size + 1


def target_size(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """Width and height after resizing, in pixels. Half a pixel rounds up; no side vanishes."""
    if settings.rescale is None:
        return width, height
    edge = max(width, height)
    target = edge * settings.rescale
    if settings.max_long_edge is not None:
        target = min(target, max(settings.max_long_edge, edge))
    ratio = target / edge
    return max(1, math.floor(width * ratio + 0.5)), max(1, math.floor(height * ratio + 0.5))


def _open(source: bytes | Path | Image, format: MediaFormat) -> Image:
    """Reads the header, checks the size, then decodes, and turns the picture upright."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise UnusableMedia("Reading pictures needs pillow; install firesteel[media].") from None
    try:
        if isinstance(source, PIL.Image.Image):
            image = source
        else:
            image = PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
        _check_size(image, format)
        image.load()  # closes the file
        return PIL.ImageOps.exif_transpose(image)
    except UnusableMedia:
        raise
    except PIL.Image.DecompressionBombError:  # before there is an image whose size could be checked
        raise UnusableMedia("The image has far too many pixels to be used. Make it smaller.") from None
    except PIL.UnidentifiedImageError:
        message = f"The image is empty, broken, or none of {', '.join(FORMATS)}; send one of these."
        raise UnusableMedia(message) from None
    except Exception as error:  # decoders raise whatever they stumble over
        if isinstance(source, Path) and not source.is_file():
            raise UnusableMedia(f"There is no image file {source}.") from None
        raise UnusableMedia(f"The image is broken ({type(error).__name__}: {error}).") from None


def _check_size(image: Image, format: MediaFormat) -> None:
    width, height = image.size
    if not width or not height:
        raise UnusableMedia(f"The image has no pixels: it is {width} x {height}.")
    # An orientation may turn it.
    patches = max(math.prod(patch_grid(width, height, format)), math.prod(patch_grid(height, width, format)))
    if patches > MAX_PATCHES:
        message = f"The image of {width} x {height} pixels would become {patches} patches; at most {MAX_PATCHES} can be"
        raise UnusableMedia(message + " used. Make it smaller.")


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if image.mode not in _EIGHT_BITS:
        raise UnusableMedia(f"The image has pixels of type {image.mode}, whose range is not known; convert it to RGB.")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = PIL.Image.new("RGBA", image.size, BACKGROUND)
    return PIL.Image.alpha_composite(background, image).convert("RGB")


def _eight_bits(image: Image) -> Image:
    """16-bit grey scaled to 0..255; its transparent level, if it has one, becomes transparent."""
    import PIL.Image

    values = np.asarray(image).astype(np.uint32)
    grey = PIL.Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if (level := image.info.get("transparency")) is not None:
        grey.putalpha(PIL.Image.fromarray(np.where(values == level, 0, 255).astype(np.uint8)))
    return grey


def _resized(image: Image, settings: ImageSettings) -> Image:
    import PIL.Image

    size = target_size(*image.size, settings)
    return image if size == image.size else image.resize(size, PIL.Image.Resampling[settings.resample])


def _cut(image: Image, format: MediaFormat) -> np.ndarray:
    """Patches of an RGB image, filled up, normalised, and repeated in time."""
    edge, settings = format.patch_size, format.image
    rows, columns = -(-image.height // edge), image.width // edge + 1
    pixels = np.full((rows * edge, columns * edge, 3), _FILL, np.float32)
    pixels[: image.height, : image.width] = np.asarray(image)
    pixels /= 255
    pixels -= np.asarray(settings.mean, np.float32)
    pixels /= np.asarray(settings.std, np.float32)
    patches = pixels.reshape(rows, edge, columns, edge, 3).swapaxes(1, 2).reshape(-1, 1, edge, edge, 3)
    return np.repeat(patches, format.temporal_patch_size, axis=1)
