"""Texts, tokenised once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffm.data.examples import Integers
from raffm.errors import DataError


class Bytes:
    """A tokenizer that needs no files: a text is its bytes in UTF-8, and 0 pads."""

    name_or_path = "bytes"
    pad_token_id = 0

    def __len__(self) -> int:
        return 256

    def __call__(
        self, texts: list[str], truncation: bool = False, max_length: int = 0, **options: Any
    ) -> dict[str, list[list[int]]]:
        """The bytes of every text."""
        return {"input_ids": [list(text.encode())[: max_length if truncation else None] for text in texts]}


def tokenised(
    chunks: Iterable[tuple[list[Any], list[Any] | None]], where: str, tokenizer: Any, max_length: int
) -> dict[str, Tensor]:
    """Token ids (int32), padded to the longest text, and their lengths; a text without tokens has one of padding.

    A chunk is texts, and second texts or None; where there are two, and the tokenizer tells them apart, `token_type_ids`.
    """
    ids: list[Integers] = []
    kinds: list[Integers] = []
    lengths: list[int] = []
    for texts, others in chunks:
        encoded = _encoded(texts, where, len(lengths), tokenizer, max_length, others)
        lengths += map(len, encoded["input_ids"])
        ids.append(np.fromiter(chain.from_iterable(encoded["input_ids"]), np.int64))
        if others is not None and "token_type_ids" in encoded:
            kinds.append(np.fromiter(chain.from_iterable(encoded["token_type_ids"]), np.int64))
    counts = np.array(lengths, np.int64)
    found = {"input_ids": padded(np.concatenate(ids), counts, padding_of(tokenizer))}
    if kinds:
        found["token_type_ids"] = padded(np.concatenate(kinds), counts, 0)
    return {**found, "lengths": torch.from_numpy(counts.clip(min=1))}


def padding_of(tokenizer: Any) -> int:
    """The token that texts are padded with: the tokenizer's, or the one that ends texts; 0 where there is neither."""
    tokens = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((token for token in tokens if isinstance(token, int)), 0)


def agree_on_padding(model: Any, inputs: Mapping[str, Tensor]) -> None:
    """Let a model's config name the token that texts are padded with: classifiers that write look for it."""
    config: Any = getattr(model, "config", None)
    if "lengths" not in inputs or not hasattr(config, "pad_token_id"):
        return
    ids, lengths = inputs["input_ids"].cpu(), inputs["lengths"].cpu()
    padding = ids[torch.arange(ids.shape[1]) >= lengths[:, None]]
    if len(padding):
        config.pad_token_id = int(padding[0])
    elif config.pad_token_id is None:
        config.pad_token_id = padding_of(config)


def identity(texts: list[Any], where: str, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """What tells one tokenizer from another, for a key: its name, its size and what it makes of some texts.

    A name is not enough: tokenizers made at hand have none, and options such as lower case do not show in it.
    """
    probe = _encoded(texts, where, 0, tokenizer, max_length)["input_ids"]
    return {
        "name": str(tokenizer.name_or_path),
        "tokens": len(tokenizer),
        "padding": padding_of(tokenizer),
        "probe": hashlib.sha256(repr(probe).encode()).hexdigest(),
    }


def _encoded(
    texts: list[Any], where: str, begin: int, tokenizer: Any, max_length: int, others: list[Any] | None = None
) -> Mapping[str, list[list[int]]]:
    """The token ids of texts, the first of which is row `begin`."""
    for row, text in chain(enumerate(texts, begin), enumerate(others or (), begin)):
        if not isinstance(text, str):
            raise DataError(f"row {row} of {where} has {text!r} where a text should be. Leave the row out or put a text there.")
    given = (texts,) if others is None else (texts, others)
    found: Mapping[str, list[list[int]]] = tokenizer(*given, truncation=True, max_length=max_length, padding=False)
    return found


def padded(ids: Integers, lengths: Integers, padding: int) -> Tensor:
    """A table of texts (int32), from all their ids one after the other, and how many each has."""
    table = np.full((len(lengths), max(1, int(lengths.max()))), padding, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = ids
    return torch.from_numpy(table)
