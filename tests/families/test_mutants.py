import pytest

from families.cases import FAMILIES, Case
from families.mutants import mutants
from raffm.errors import RaffmError
from raffm.models.verify import verified_rows, verify

# Sizes chosen so that as many groups as possible have the same length: then a wrong label fits its shape.
EQUAL = {
    "vit": {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "num_labels": 16, "num_hidden_layers": 2},
    "bert": {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "num_labels": 16,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "max_position_embeddings": 16,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [2, 2], "num_labels": 8},
    "raffm_resnet": {"widths": (8, 8), "depths": (2, 2), "classes": 8},
}


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_verify_catches_every_mutant_of_a_table(case: Case) -> None:
    model = case.build(**EQUAL[case.family])
    made = list(mutants(model, case.family))
    real = [mutant for mutant in made if not mutant.equivalent]
    survivors = []
    for mutant in real:
        try:
            if all(row.verdict != "wrong" for row in verified_rows(model, mutant.table)):
                survivors.append(mutant.what)
        except RaffmError:
            pass  # refused before anything ran: caught
    assert len(real) >= 20
    assert survivors == []


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_mutants_called_equivalent_are_true_claims(case: Case) -> None:
    model = case.build(**EQUAL[case.family])
    for mutant in mutants(model, case.family):
        if mutant.equivalent:
            assert verify(model, mutant.table).holds, mutant.what
