"""Which elements of a tensor are kept, in few bytes: a bit an element where many are, a byte a gap where few are.

A gap is the number of elements left out between two kept ones. 255 stands for 255 of them with more to come, so that a gap of
any length can be said. At a density of 1/64 that takes about 0.127 bits an element; the least possible is 0.116.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.errors import UpdateError

Bytes = NDArray[np.uint8]

BITS, GAPS = 0, 1
"""The first byte says how the others are to be read."""

MORE = 255


def encode(kept: Tensor) -> bytes:
    """The places at which a bool tensor is true."""
    flat = kept.detach().cpu().reshape(-1).numpy()
    bits, gaps = np.packbits(flat), _gaps(flat)
    return bytes([GAPS]) + gaps.tobytes() if len(gaps) < len(bits) else bytes([BITS]) + bits.tobytes()


def decode(content: bytes, shape: torch.Size) -> Tensor:
    """The bool tensor that was encoded."""
    if not content or content[0] not in (BITS, GAPS):
        raise UpdateError("a mask begins with a byte that no mask begins with: it is damaged.")
    body, count = np.frombuffer(content, np.uint8, offset=1), shape.numel()
    flat = _from_bits(body, count) if content[0] == BITS else _from_gaps(body, count)
    return torch.from_numpy(flat).view(shape)


def _gaps(flat: NDArray[np.bool_]) -> Bytes:
    places = np.flatnonzero(flat)
    gaps = np.diff(places, prepend=-1) - 1
    full = gaps // MORE
    ends = np.cumsum(full + 1) - 1  # where the last byte of every gap stands
    content = np.full(int(ends[-1]) + 1 if len(ends) else 0, MORE, np.uint8)
    content[ends] = gaps % MORE
    return content


def _from_bits(body: Bytes, count: int) -> NDArray[np.bool_]:
    if len(body) != -(-count // 8):
        raise UpdateError(f"a mask of {count} elements takes {-(-count // 8)} bytes, but {len(body)} came.")
    return np.unpackbits(body, count=count).astype(np.bool_)


def _from_gaps(body: Bytes, count: int) -> NDArray[np.bool_]:
    passed = np.cumsum(body.astype(np.int64))
    ends = np.flatnonzero(body != MORE)
    places = passed[ends] + np.arange(len(ends))
    if len(body) and (body[-1] == MORE or places[-1] >= count):
        raise UpdateError(f"a mask of {count} elements names one beyond them, or ends in the middle of a gap: it is damaged.")
    flat = np.zeros(count, np.bool_)
    flat[places] = True
    return flat
