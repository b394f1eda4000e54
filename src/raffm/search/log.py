"""What a search has judged, line by line on the disk, so that one that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raffm.errors import CheckpointError
from raffm.search.front import Sizes


class Log:
    """Scores by sizes and number of examples; in memory alone where there is no path.

    The first line says what was searched. A file of another search is refused; a last line that was cut short is forgotten.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._scores: dict[tuple[int, str], float] = {}
        if path is None:
            return
        if path.is_file() and "\n" in path.read_text(encoding="utf-8"):
            self._read(path, dict(about or {}))
        else:  # or it was stopped in its first line
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")
            self._write(dict(about or {}))

    def __len__(self) -> int:
        return len(self._scores)

    def score(self, sizes: Sizes, examples: int) -> float | None:
        """The score of sizes on so many examples, if it is known."""
        return self._scores.get(_key(sizes, examples))

    def add(self, sizes: Sizes, examples: int, score: float) -> None:
        """Note a score; it is on the disk when this returns."""
        self._scores[_key(sizes, examples)] = score
        self._write({"sizes": dict(sizes), "examples": examples, "score": score})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path, about: Mapping[str, Any]) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{str(path)!r} is damaged: {error}. Give another --out, or delete it.") from None
        begun, asked = (lines[0] if lines else {}), json.loads(json.dumps(about))
        if begun != asked:
            differing = sorted(key for key in {*begun, *asked} if begun.get(key) != asked.get(key))
            raise CheckpointError(
                f"{str(path)!r} is the log of another search: {', '.join(differing)} differ. Give another --out, or delete it."
            )
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in lines[1:]:
            self._scores[_key(line["sizes"], line["examples"])] = line["score"]


def _key(sizes: Sizes, examples: int) -> tuple[int, str]:
    return examples, json.dumps(dict(sizes), sort_keys=True)
