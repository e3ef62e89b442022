"""Image files of whatever origin: few decoders see them, none larger than any photograph is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fednorm.errors import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
"""Only these decoders see files: Pillow knows dozens, few are looked after, and one hands PostScript to a program."""
MOST_PIXELS = 89_478_485
"""A quarter of a gigabyte in colour, which is what Pillow warns of."""


class BadImage(Exception):
    """An image that cannot be used; the text says why, after its name, and `fix` what to do about it."""

    def __init__(self, text: str, fix: str = "remove it") -> None:
        super().__init__(text)
        self.fix = fix


def open_image(source: Path | IO[bytes]) -> Image:
    """Open an image, of which only the beginning is read."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"is not a readable image (none of {', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(*_TOO_LARGE) from None
    except Exception as error:  # whatever a decoder makes of damaged bytes
        raise BadImage(f"is not a readable image ({first_line(error)})") from None
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise BadImage(*_TOO_LARGE)
    return image


_TOO_LARGE = (f"has more than {MOST_PIXELS:,} pixels", "remove it or make it smaller")


@contextmanager
def decoding() -> Iterator[None]:
    """What decoding raises, as a `BadImage`."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # whatever a decoder makes of damaged bytes
        raise BadImage(f"is not a readable image ({first_line(error)})") from None


@contextmanager
def own_limit() -> Iterator[None]:
    """Keep Pillow from warning of images that are refused anyway; not while threads are at work already."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield
