"""Sets of two texts an example, as GLUE has them, and a tokenizer for their eight words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]


def tokenizer(folder: Path) -> Any:
    """A real one, of BERT's kind, with eight words."""
    from transformers import BertTokenizerFast

    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return BertTokenizerFast(str(folder / "vocab.txt"))


def pairs(place: Path, labels: list[object]) -> None:
    """Files as GLUE has them: `NAME-train.parquet` and so on, test labels hidden."""
    place.parent.mkdir(parents=True, exist_ok=True)
    hidden = [-1.0 if isinstance(label, float) else -1 for label in labels]
    for part, known in (("train", labels), ("validation", labels), ("test", hidden)):
        first = ["a b c" if at % 2 else "a" for at in range(len(known))]
        second = ["d", "b b", "c d a b"] * len(known)
        table = pa.table({"sentence1": first, "sentence2": second[: len(known)], "label": known})
        pq.write_table(table, place.parent / f"{place.name}-{part}.parquet")
