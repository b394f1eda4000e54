"""A layout in one line, for tests that are written by hand."""

from __future__ import annotations

from typing import Any

from raffm.algebra.axis import parse, parse_label
from raffm.algebra.group import Group, Tie
from raffm.algebra.layout import Layout


def small_layout(labels: dict[str, str], *groups: Group, ties: dict[str, str] | None = None, **rest: Any) -> Layout:
    """Labels written as `"residual -> heads*qk @ 6, 4"`: the shape follows the sign."""
    texts, shapes = {}, {}
    for name, line in labels.items():
        texts[name], _, shape = line.partition("@")
        shapes[name] = tuple(int(length) for length in shape.split(",") if length.strip())
    return Layout.build(
        {name: parse_label(text.strip()) for name, text in texts.items()},
        shapes,
        groups,
        [Tie(parse(left), parse(right)) for left, right in (ties or {}).items()],
        **rest,
    )
