import pytest

from families.cases import FAMILIES as BY_FAMILY
from families.cases import Case
from families.mutants import mutants
from raffm.errors import RaffmError
from raffm.models.table import shipped
from raffm.models.verify import verified_rows, verify

# Sizes chosen so that as many groups as possible have the same length: then a wrong label fits its shape.
_VIT = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "num_labels": 16, "num_hidden_layers": 2}
_BERT = {**_VIT, "vocab_size": 16, "max_position_embeddings": 16}
_LLAMA = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16}
_LLAMA |= {"num_hidden_layers": 2, "vocab_size": 16}
_T5 = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 16, "vocab_size": 16, "relative_attention_num_buckets": 16}
_SAM = {**shipped("sam").tiny["config"]["vision_config"], "mlp_dim": 16, "num_hidden_layers": 2, "output_channels": 16}

EQUAL = {
    "vit": _VIT,
    "deit": _VIT,
    "bert": _BERT,
    "electra": {**_BERT, "embedding_size": 12},
    "roberta": {**_BERT, "max_position_embeddings": 24},
    "distilbert": {"dim": 16, "n_heads": 4, "hidden_dim": 16, "n_layers": 2, "vocab_size": 16, "num_labels": 16}
    | {"max_position_embeddings": 16},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [2, 2], "num_labels": 8},
    "raffm_resnet": {"widths": (8, 8), "depths": (2, 2), "classes": 8},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_inner": 16, "n_layer": 2, "vocab_size": 16, "n_positions": 16},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_LLAMA, "max_window_layers": 1},
    "t5": {**_T5, "num_layers": 2, "num_decoder_layers": 2},
    "sam_vision_model": _SAM,
}
PARTS = 3
"""Tables have up to hundreds of mutants: a third of them is tried in every run of the tests, all in `make test-all`."""

FAMILIES = [case for case in BY_FAMILY if case.family in EQUAL]  # SAM's whole model adds what is never cut


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_verify_catches_every_mutant_of_a_table(case: Case, part: int) -> None:
    model = case.build(**EQUAL[case.family])
    real = [mutant for mutant in mutants(model, case.family) if not mutant.equivalent]
    survivors = []
    for mutant in real[part::PARTS]:
        try:
            if all(row.verdict != "wrong" for row in verified_rows(model, mutant.table, first=mutant.suspects)):
                survivors.append(mutant.what)
        except RaffmError:
            pass  # refused before anything ran: caught
    assert len(real) >= 20
    assert survivors == []


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_mutants_called_equivalent_are_true_claims(case: Case) -> None:
    model = case.build(**EQUAL[case.family])
    for mutant in mutants(model, case.family):
        if mutant.equivalent:
            assert verify(model, mutant.table).holds, mutant.what
