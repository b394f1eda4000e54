"""Plays, to learn to write: what each speaker says, in pieces of so many tokens. Every speaker is an owner.

A play is a text of blocks, with an empty line between: a line `SPEAKER:`, then what is said.
"""

from __future__ import annotations

import lzma
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raffm.data.examples import Dataset, Examples
from raffm.data.splits import stratified
from raffm.data.text import padding_of
from raffm.errors import DataError

LEAST = 1000
"""Characters below which a speaker is no client."""

IGNORED = -100
"""The label of padding."""

TESTED = 0.2
"""The part of every speaker's pieces that is for tests."""


def found(places: list[Path]) -> Path | None:
    """The first play at these places: a file `.txt` or `.txt.xz`, or a folder with one named `input`."""
    names = [place / name for place in places for name in ("input.txt", "input.txt.xz")]
    return next((file for file in [*places, *names] if file.is_file() and file.name.endswith((".txt", ".txt.xz"))), None)


def speeches(text: str) -> dict[str, str]:
    """What every speaker says, in the order of their first words; those who say little are left out."""
    said: dict[str, list[str]] = {}
    for block in text.replace("\r\n", "\n").split("\n\n"):
        name, colon, words = block.strip("\n").partition(":\n")
        if colon and "\n" not in name:
            said.setdefault(name, []).append(words)
    whole = {name: "\n".join(words) for name, words in said.items()}
    return {name: words for name, words in whole.items() if len(words) >= LEAST}


def load_play(file: Path, tokenizer: Any, max_length: int) -> Dataset:
    """A play as a data set whose labels are the tokens themselves; a fifth of every speaker's pieces is for tests."""
    if tokenizer is None:
        raise DataError(f"{str(file)!r} holds texts. Give a tokenizer to load it.")
    if max_length < 2:
        raise DataError(f"max_length is {max_length!r}; to tell the next token, a piece needs at least 2.")
    said = speeches(_read(file))
    if not said:
        raise DataError(
            f"{str(file)!r} has no speaker with {LEAST} characters. A block is a line `SPEAKER:` and what is said, and between "
            "blocks is an empty line."
        )
    tokens = tokenizer(list(said.values()), add_special_tokens=False, verbose=False)["input_ids"]
    pieces = [_pieces(ids, max_length) for ids in tokens]
    owners = np.repeat(np.arange(len(pieces)), [len(several) for several in pieces])
    whole = _examples(list(chain.from_iterable(pieces)), max_length, padding_of(tokenizer))
    kept, held = stratified(owners, math.ceil(TESTED * len(owners)), seed=0)
    return Dataset(file.parent.name, whole.take(kept), whole.take(held), (), None, (owners[kept], owners[held]))


def _read(file: Path) -> str:
    try:
        content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        return content.decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}. Is it whole, and what its name says?") from None


def _pieces(ids: list[int], length: int) -> list[list[int]]:
    """Stretches of so many tokens; the last may be shorter, but one token alone tells nothing."""
    several = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
    return [piece for piece in several if len(piece) > 1]


def _examples(pieces: list[list[int]], length: int, padding: int) -> Examples:
    ids = torch.full((len(pieces), length), padding, dtype=torch.int32)
    labels = torch.full((len(pieces), length), IGNORED, dtype=torch.int64)
    for place, piece in enumerate(pieces):
        ids[place, : len(piece)] = torch.tensor(piece, dtype=torch.int32)
        labels[place, : len(piece)] = torch.tensor(piece)
    return Examples({"input_ids": ids, "lengths": torch.tensor([len(piece) for piece in pieces])}, labels)
