"""Images, decoded once to pixels (uint8) of one size."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def decoded(cells: Iterable[Any], count: int, where: str, size: int | None) -> Tensor:
    """The images of a column as pixels (count, channels, height, width): one channel if all are gray, else three.

    A cell is a path, the bytes of a file, or both as Hugging Face stores them. Images are resized to a square of
    `size` pixels; without it all must have one size.
    """
    store: Pixels | None = None
    for row, cell in enumerate(cells):
        pixels = _pixels(cell, size, f"row {row} of {where}")
        if store is None:
            store = np.zeros((count, *pixels.shape), np.uint8)
        if pixels.shape[1:] != store.shape[2:]:
            raise DataError(_sizes_differ(store, pixels, f"row {row} of {where}"))
        if len(pixels) > store.shape[1]:
            store = np.repeat(store, len(pixels), axis=1)  # the first images were gray
        store[row] = pixels
    assert store is not None
    return torch.from_numpy(store)


def resized(images: Tensor, size: int) -> Tensor:
    """Gray pixels (images, 1, height, width) at another size."""
    from PIL import Image

    squares = [Image.fromarray(image[0]).resize((size, size), Image.Resampling.BILINEAR) for image in images.numpy()]
    return torch.from_numpy(np.stack([np.asarray(square) for square in squares])[:, None])


def in_folder(folder: Path) -> list[tuple[Path, str]]:
    """The image files in the folders of a folder, each with the name of its folder: its class."""
    names = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [(file, entry.name) for entry in names for file in sorted(entry.iterdir()) if file.suffix.lower() in SUFFIXES]


def _pixels(cell: Any, size: int | None, where: str) -> Pixels:
    """One image as (channels, height, width)."""
    from PIL import Image

    try:
        with Image.open(_file(cell, where)) as image:
            return _array(image, size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"the image in {where} cannot be read: {error}. Replace it or leave it out.") from None


def _array(image: Image.Image, size: int | None) -> Pixels:
    from PIL.Image import Resampling

    converted = image if image.mode == "L" else image.convert("RGB")
    if size is not None:
        converted = converted.resize((size, size), Resampling.BILINEAR)
    array: Pixels = np.asarray(converted, np.uint8)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _file(cell: Any, where: str) -> Any:
    """What Pillow can open: a path or a file in memory."""
    content = (cell.get("bytes") or cell.get("path")) if isinstance(cell, Mapping) else cell
    if not content:
        raise DataError(f"{where} has no image. Leave the row out.")
    return io.BytesIO(content) if isinstance(content, bytes) else content


def _sizes_differ(store: Pixels, pixels: Pixels, where: str) -> str:
    (height, width), (other, wide) = store.shape[2:], pixels.shape[1:]
    return (
        f"the image in {where} has {wide} x {other} pixels, those before it {width} x {height}."
        " Give image_size to resize all of them to one square."
    )
