"""What a server knows of its nodes, and the keys of a trial."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography import x509

from methods.runs import federation, plan_of
from raffm.algebra.selection import Selection
from raffm.deploy.flower import Records, about_of, arrays_of
from raffm.deploy.keys import write_certificates, write_node_key
from raffm.deploy.ledger import UNNUMBERED, Known, fitting, fleet_of, known_from, ledger, numbered, returned
from raffm.deploy.letters import letter_of, parcel_of
from raffm.deploy.statement import Device, device_from, quantity, stated
from raffm.devices.budget import Budget
from raffm.devices.cost import CostModel
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.shapes import sizes_at
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.resnet import ResNet, ResNetConfig
from raffm.rounds.local import Local

NODES = [
    Known(70, 0, 5, (0, 2), Device(1.0)),
    Known(50, 1, 3, (4,), Device(0.25)),
    Known(60, 2, 4, (0, 1, 2, 3)),
]


def test_a_plan_over_a_ledger_knows_counts_classes_and_sizes_and_has_no_example() -> None:
    data = ledger(NODES, federation("vit", [[0]]).dataset)
    plan = plan_of("vit", "heterofl", data=data)
    assert [plan.weight(client) for client in range(3)] == [5, 3, 4]
    assert [plan.present(client).nonzero().flatten().tolist() for client in range(3)] == [[0, 2], [4], [0, 1, 2, 3]]
    assert data.dataset.train.inputs == {}
    fleet = fleet_of(NODES, lambda budget: 0.5)
    assert [fleet.tiers[place].size for place in fleet.tiers_of(3, seed=9).tolist()] == [1.0, 0.25, 1.0]


def test_nodes_take_part_as_clients_from_0_on_each_once() -> None:
    assert [each.node for each in numbered([NODES[2], NODES[0], NODES[1]])] == [70, 50, 60]
    gap = numbered([NODES[0], Known(99, 7, 1, (0,))])
    assert [(each.client, each.node) for each in gap] == [(0, NODES[0].node), (1, 99)]


def test_of_two_nodes_with_one_number_the_second_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert numbered([Known(99, NODES[0].client, 1, (0,)), NODES[0]]) == [replace(NODES[0], client=0)]
    assert "node 99 is left out" in caplog.text


def test_a_run_that_goes_on_has_the_clients_that_it_began_with(caplog: pytest.LogCaptureFixture) -> None:
    measured = [Known(5, 0, 10, (0,), Device(speed=1e9)), Known(6, 1, 20, (1,)), Known(7, 2, 30, (0, 1), Device(0.25))]
    kept = [known_from(each["node"], each) for each in json.loads(json.dumps([known.to_json() for known in measured]))]
    assert kept == measured
    again = [Known(5, 0, 11, (0,), Device(speed=2e9)), Known(8, 1, 20, (1,)), Known(9, UNNUMBERED, 3, (0,))]
    back = returned(kept, again)
    assert [each.node for each in back] == [5, 8, 7], "the second has a new key, the third is gone"
    assert [replace(each, node=0) for each in back] == [replace(each, node=0) for each in measured]
    assert "node 9 is left out: it was not there when the run began" in caplog.text


def test_who_states_no_number_gets_one_in_the_order_of_the_nodes() -> None:
    strangers = [Known(9, UNNUMBERED, 1, (0,)), Known(3, UNNUMBERED, 1, (0,)), Known(5, 1, 1, (0,))]
    assert [(each.client, each.node) for each in numbered(strangers)] == [(0, 3), (1, 5), (2, 9)]


# -- what a node can hold ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "found"), [("45M", 45e6), ("1.5G", 1.5e9), (" 2e9 ", 2e9), (7, 7.0), ("3k", 3e3)])
def test_numbers_as_people_write_them(text: object, found: float) -> None:
    assert quantity(text, "speed") == found


@pytest.mark.parametrize("text", ["", "M", "-3", "0", "nan", "inf", "many"])
def test_other_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(RunError, match="`max-params`"):
        quantity(text, "max-params")


def test_a_node_states_a_part_or_limits_and_the_server_reads_it() -> None:
    assert device_from(stated({"size": "1/4", "partition-id": 3, "x-mine": "x"})) == Device(0.25)
    said = stated({"max-params": "45M", "max-memory": "2G", "speed": "10G"})
    assert device_from(said) == Device(None, Budget(max_params=45_000_000, max_memory=2_000_000_000), 1e10)
    for wrong in ("0", "3/2", "half"):
        with pytest.raises(RunError, match="`size`"):
            stated({"size": wrong})


def test_a_slip_of_the_pen_is_refused_and_does_not_give_the_full_model() -> None:
    with pytest.raises(RunError, match=r"the unknown key 'max-param'\. Did you mean 'max-params'"):
        stated({"max-param": "60k"})
    with pytest.raises(RunError, match=r"the unknown key 'zzz'\. There are: size"):
        stated({"zzz": 1})


def test_a_node_that_measures_itself_states_what_is_missing() -> None:
    said = stated({"auto": True})
    assert said["speed"] > 1e6
    assert said["max-memory"] > 1e6
    assert stated({"auto": True, "max-params": "1M"}).keys() == {"max-params", "speed"}


def test_a_node_gets_the_largest_size_that_keeps_all_its_limits() -> None:
    plan = plan_of("vit", "heterofl")
    whole = plan.server.layout.count(Selection())
    fits = fitting(plan.server, (1.0, 1 / 4, 1 / 16), plan.local)
    assert fits(Budget(max_params=whole)) == 1.0
    assert fits(Budget(max_params=whole - 1)) == 1 / 4
    assert fits(Budget(max_params=whole, max_flops=1 << 60, max_memory=1 << 40)) == 1.0
    with pytest.raises(RunError, match=r"it holds 10 params; the smallest submodel, 0\.0625 of the model, takes"):
        fits(Budget(max_params=10))


def test_limits_are_those_of_the_shapes_that_a_method_cuts() -> None:
    """A balanced shape does more work with as many parameters, and nested steps take more memory."""
    server = Labelled.of(ResNet(ResNetConfig(widths=(24, 48), depths=(1, 1), classes=5, image_size=16)))
    sizes, local = (1.0, 1 / 4), Local("sgd", lr=0.1)
    uniform, nested = (fitting(server, sizes, local, method_of(name)) for name in ("heterofl", "nested"))
    shape = server.layout.select(sizes_at(server, 1 / 4, sizes, "balanced"))
    work = CostModel(server.model, server.layout, server.table).flops(server.layout.sizes_of(shape))
    assert nested(Budget(max_flops=work)) == uniform(Budget(max_flops=work)) == 1 / 4
    assert uniform(Budget(max_flops=work - 1)) == 1 / 4
    with pytest.raises(RunError, match="the smallest submodel"):
        nested(Budget(max_flops=work - 1))
    plain = CostModel(server.model, server.layout, server.table, local.batch, "sgd").memory(server.layout.sizes)
    assert uniform(Budget(max_memory=plain)) == 1.0
    assert nested(Budget(max_memory=plain)) == 1 / 4


def test_limits_go_on_to_a_method_that_heeds_them_and_become_sizes_for_others() -> None:
    limited = Known(1, 0, 5, (0,), Device(None, Budget(max_params=1000), 5e9))
    heterofl, raffm = (fleet_of([limited], lambda budget: 0.25, method_of(name)).tiers[0] for name in ("heterofl", "raffm"))
    assert (heterofl.size, heterofl.budget, heterofl.speed) == (0.25, None, 5e9)
    assert raffm.budget == Budget(max_params=1000)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"examples": 3, "classes": [], "device": {}},
        {"examples": 0, "classes": [1], "device": {}},
        {"examples": 3, "classes": [-1], "device": {}},
        {"examples": "many", "classes": [1], "device": {}},
        {"examples": float("inf"), "classes": [1], "device": {}},
        {"examples": 10**15, "classes": [1], "device": {}},
        {"examples": 3, "classes": [10**15], "device": {}},
        {"examples": 3, "classes": [1], "device": {"size": "7"}},
        {"examples": 3, "classes": [1], "device": {"max-params": "nan"}},
    ],
)
def test_a_statement_that_makes_no_sense_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(RunError):
        known_from(4, said)


def test_a_class_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(RunError, match="class 99"):
        ledger([Known(1, 0, 5, (0, 99))], federation("vit", [[0]]).dataset)


def test_records_carry_json_and_arrays_of_any_shape_bit_for_bit() -> None:
    arrays = {
        "number": np.array(3, np.int64),
        "empty": np.zeros((0, 2), np.float32),
        "half": torch.randn(4).bfloat16().view(torch.int16).numpy(),
        "bytes": np.frombuffer(b"\x01\xff\x00", np.uint8),
        "table": np.arange(6, dtype=np.float32).reshape(2, 3).T.copy(),
    }
    about = {"round": 3, "numbers": {"threshold": 0.1}, "none": None}
    content = Records().of(about, arrays=arrays)
    read, found = about_of(content), arrays_of(content, "arrays")
    assert read == about
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_arrays_that_come_several_times_in_a_row_are_one_record() -> None:
    records, arrays = Records(), {"weight": np.zeros(3)}
    one, two = (records.of({"client": client}, arrays=arrays, own={"limit": np.ones(1)}) for client in range(2))
    assert one.array_records["arrays"] is two.array_records["arrays"]
    assert one.array_records["own"] is not two.array_records["own"]
    assert records.of({}, arrays={"weight": np.ones(3)}).array_records["arrays"] is not one.array_records["arrays"]


def test_a_large_message_is_its_tensors_and_less_than_a_hundredth_more() -> None:
    shapes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8}
    plan = plan_of("vit", "fiarse", server=Labelled.of(tiny("vit", **shapes)))
    order = plan.orders(0, [0])[0]
    held = plan.method.held(plan.server, order.share)
    letter = letter_of(plan, order, held, parcel_of(plan, order.share, held))
    content = Records().of(letter.about, arrays=letter.arrays, frozen=letter.frozen, own=letter.own)
    numbers = sum(tensor.numel() * tensor.element_size() for tensor in plan.server.tensors.values())
    whole = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    assert numbers > 10e6
    assert whole + len(json.dumps(letter.about)) < 1.01 * numbers


def test_the_authority_vouches_for_the_server_and_secrets_are_their_owner_s(tmp_path: Path) -> None:
    write_certificates(tmp_path, ("example.org", "10.0.0.7"))
    write_node_key(tmp_path / "node")
    root, server = (x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    for secret in ("server.key", "node"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
    assert (tmp_path / "node.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert not (tmp_path / "ca.key").exists()
