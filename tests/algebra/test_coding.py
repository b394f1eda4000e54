"""Masks on the wire: exact, and as short as they can be said to be."""

from __future__ import annotations

from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffm.algebra.coding import decode, encode
from raffm.errors import UpdateError


@settings(max_examples=200)
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 1000))
def test_what_is_decoded_is_what_was_encoded(count: int, density: float, seed: int) -> None:
    """Invariant 35."""
    kept = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < density
    assert torch.equal(decode(encode(kept), kept.shape), kept)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 5000])
def test_gaps_of_any_length_are_said(gap: int) -> None:
    kept = torch.zeros(3, gap + 1, dtype=torch.bool)
    kept[:, gap] = True
    assert torch.equal(decode(encode(kept), kept.shape), kept)


@pytest.mark.parametrize("density", [1 / 64, 1 / 16, 1 / 4, 0.5])
def test_masks_are_not_much_longer_than_they_must_be(density: float) -> None:
    count = 1 << 20
    kept = torch.rand(count, generator=torch.Generator().manual_seed(0)) < density
    entropy = -density * log2(density) - (1 - density) * log2(1 - density)
    bits = 8 * len(encode(kept)) / count
    assert entropy < bits < min(1.001, 1.6 * entropy)
    if density == 1 / 64:
        assert bits < 0.13


def test_nothing_and_everything() -> None:
    for kept in (torch.zeros(100, dtype=torch.bool), torch.ones(100, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)):
        assert torch.equal(decode(encode(kept), kept.shape), kept)
    assert len(encode(torch.zeros(10_000, dtype=torch.bool))) == 1


@pytest.mark.parametrize("content", [b"", b"\x07abc", b"\x00a", b"\x01\xff", b"\x01\x05\x60", b"\x01\x63\x00"])
def test_damaged_masks_are_refused(content: bytes) -> None:
    with pytest.raises(UpdateError, match="mask"):
        decode(content, torch.Size([100]))
