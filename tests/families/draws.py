"""Hypothesis strategies over a layout: sizes and Selections of every cuttable group, different in every layer."""

import torch
from hypothesis import strategies as st

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection


def legal_sizes(layout: Layout, name: str) -> st.SearchStrategy[int]:
    group = layout.groups[name]
    least = max(group.least, len(group.required))
    return st.sampled_from([size for size in range(least, group.size + 1) if size % group.step == 0 or size == group.size])


@st.composite
def selections(draw: st.DrawFn, layout: Layout, is_exact_only: bool = False, has_depth: bool = True) -> Selection:
    """A random legal Selection; `is_exact_only` leaves out groups whose cut changes norm statistics."""
    ranking = draw(rankings(layout))
    tied = {str(tie.left) for tie in layout.ties}
    sizes = {}
    for name in layout.free:
        group = layout.groups[name]
        if name in tied or (is_exact_only and group.approximate) or (group.path and not has_depth):
            continue
        if draw(st.booleans()):
            sizes[name] = draw(legal_sizes(layout, name))
    return ranking.cut(layout, sizes)


@st.composite
def rankings(draw: st.DrawFn, layout: Layout) -> Ranking:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = {}
    for name in layout.free:
        group = layout.groups[name]
        rows = (layout.groups[group.base].size,) if group.base else ()
        order[name] = torch.rand((*rows, group.size), generator=generator).argsort(-1)
    return Ranking(order)
