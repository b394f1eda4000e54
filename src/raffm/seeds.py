"""Randomness: every choice comes from a generator derived from the root seed and what it is for."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator that depends on the seed and the purpose alone: same in any order of calls, in any process.

    >>> draw = generator(0, "submodel", 3)
    >>> int(torch.randint(100, (1,), generator=draw))
    8
    """
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
