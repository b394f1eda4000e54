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


def tokenised(chunks: Iterable[list[Any]], where: str, tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    """Token ids (int32), padded to the longest text, and their lengths; a text without tokens has one of padding."""
    ids: list[Integers] = []
    lengths: list[int] = []
    for texts in chunks:
        encoded = _encoded(texts, where, len(lengths), tokenizer, max_length)
        lengths += map(len, encoded)
        ids.append(np.fromiter(chain.from_iterable(encoded), np.int64))
    return _padded(np.concatenate(ids), np.array(lengths, np.int64), tokenizer.pad_token_id or 0)


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
        config.pad_token_id = 0


def identity(texts: list[Any], where: str, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """What tells one tokenizer from another, for a key: its name, its size and what it makes of some texts.

    A name is not enough: tokenizers made at hand have none, and options such as lower case do not show in it.
    """
    probe = _encoded(texts, where, 0, tokenizer, max_length)
    return {
        "name": str(tokenizer.name_or_path),
        "tokens": len(tokenizer),
        "padding": tokenizer.pad_token_id,
        "probe": hashlib.sha256(repr(probe).encode()).hexdigest(),
    }


def _encoded(texts: list[Any], where: str, begin: int, tokenizer: Any, max_length: int) -> list[list[int]]:
    """The token ids of texts, the first of which is row `begin`."""
    for row, text in enumerate(texts, begin):
        if not isinstance(text, str):
            raise DataError(f"row {row} of {where} has {text!r} where a text should be. Leave the row out or put a text there.")
    ids: list[list[int]] = tokenizer(texts, truncation=True, max_length=max_length, padding=False)["input_ids"]
    return ids


def _padded(ids: Integers, lengths: Integers, padding: int) -> dict[str, Tensor]:
    table = np.full((len(lengths), max(1, int(lengths.max()))), padding, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = ids
    return {"input_ids": torch.from_numpy(table), "lengths": torch.from_numpy(lengths.clip(min=1))}
