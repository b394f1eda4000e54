"""Norms of every size's own: rows are a group, and a submodel computes what it would with plain norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raffm.algebra.selection import Selection
from raffm.errors import SpaceError
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.rows import SIZES, is_norm, plain, plain_submodel, with_rows
from raffm.models.salience import rank
from raffm.models.sample import sample_inputs
from raffm.models.surgery import submodel
from raffm.models.table import shipped
from raffm.models.verify import verify

FAMILIES = ("raffm_resnet", "vit", "bert", "llama", "t5")


def said(model: nn.Module, server: Labelled) -> torch.Tensor:
    inputs: Any = sample_inputs(server.model, server.table, batch=2, tokens=6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output: Any = model(**inputs)
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_rows_is_the_model_and_shares_all_but_its_norms(family: str) -> None:
    server = Labelled.of(tiny(family).eval())
    rows = with_rows(server, 3)
    assert rows.layout.groups[SIZES].size == 3
    torch.testing.assert_close(said(rows.model, server), said(server.model, server), rtol=0, atol=0)
    shared = {id(tensor) for tensor in server.tensors.values()}
    own = [name for name, tensor in rows.tensors.items() if id(tensor) not in shared]
    assert own and all(name.endswith("_rows") for name in own if rows.layout.kind(name) == "parameter")
    assert any(is_norm(child) for child in server.model.modules()), "the given model keeps its norms"
    more = sum(2 * server.tensors[name.removesuffix("_rows")].numel() for name in own if name.endswith("_rows"))
    assert rows.layout.count(Selection()) == server.layout.count(Selection()) + more


@pytest.mark.parametrize("family", FAMILIES)
def test_a_submodel_reads_the_row_that_it_holds_and_is_plain_again(family: str) -> None:
    server = Labelled.of(tiny(family).eval())
    rows = with_rows(server, 3)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in rows.tensors.items():
            if name.endswith("_rows"):
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
    for place in range(3):
        small = submodel(rows.model, rows.layout, rows.layout.select({SIZES: [place]})).eval()
        with torch.no_grad():
            for name, tensor in rows.tensors.items():
                if name.endswith("_rows"):
                    server.tensors[name.removesuffix("_rows")].copy_(tensor[place])
        expected = said(server.model, server)
        torch.testing.assert_close(said(small, server), expected, rtol=1e-5, atol=1e-5)
        again = plain(small)
        torch.testing.assert_close(said(again, server), expected, rtol=1e-5, atol=1e-5)
        assert set(again.state_dict()) == set(server.model.state_dict())


def test_rows_are_labelled_rightly_and_are_no_width() -> None:
    given = Labelled.of(tiny("vit"))
    rows = with_rows(given, 3)
    assert verify(rows.model).holds
    assert SIZES not in rows.layout.free and SIZES not in width_groups(rows.layout)
    orders = [rank(each.model, each.layout).order for each in (given, rows)]
    assert set(orders[0]) == set(orders[1])
    assert all(torch.equal(order, orders[1][group]) for group, order in orders[0].items()), "salience does not look at rows"
    assert rows.model.config is given.model.config
    with pytest.raises(SpaceError, match="have rows already"):
        with_rows(rows, 3)


def test_a_table_that_a_model_carries_is_its_own_again() -> None:
    model = tiny("vit")
    model.raffm_table = shipped("vit")  # type: ignore[assignment]
    rows = with_rows(Labelled.of(model), 2)
    small = plain_submodel(rows, submodel(rows.model, rows.layout, rows.layout.select({SIZES: [1]})))
    assert small.raffm_table == model.raffm_table
