"""What a server knows of its nodes, and the keys of a trial."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography import x509

from methods.runs import federation, plan_of
from raffm.deploy.flower import content_of, read_content
from raffm.deploy.keys import write_certificates, write_node_key
from raffm.deploy.ledger import Known, fleet_of, ledger, numbered
from raffm.errors import RunError

NODES = [Known(70, 0, 5, (0, 2), 1.0), Known(50, 1, 3, (4,), 0.25), Known(60, 2, 4, (0, 1, 2, 3), 1.0)]


def test_a_plan_over_a_ledger_knows_counts_classes_and_sizes_and_has_no_example() -> None:
    data = ledger(NODES, federation("vit", [[0]]).dataset)
    plan = plan_of("vit", "heterofl", data=data)
    assert [plan.weight(client) for client in range(3)] == [5, 3, 4]
    assert [plan.present(client).nonzero().flatten().tolist() for client in range(3)] == [[0, 2], [4], [0, 1, 2, 3]]
    assert data.dataset.train.inputs == {}
    fleet = fleet_of(NODES)
    assert [fleet.tiers[place].size for place in fleet.tiers_of(3, seed=9).tolist()] == [1.0, 0.25, 1.0]


def test_nodes_take_part_as_clients_from_0_on_each_once() -> None:
    assert [each.node for each in numbered([NODES[2], NODES[0], NODES[1]])] == [70, 50, 60]
    with pytest.raises(RunError, match=r"they say they are \[0, 0\]"):
        numbered([NODES[0], Known(9, 0, 1, (0,))])
    with pytest.raises(RunError, match=r"they say they are \[-1, 0\]"):
        numbered([NODES[0], Known(9, -1, 1, (0,))])


def test_records_carry_json_and_arrays_of_any_shape_bit_for_bit() -> None:
    arrays = {
        "number": np.array(3, np.int64),
        "empty": np.zeros((0, 2), np.float32),
        "half": torch.randn(4).bfloat16().view(torch.int16).numpy(),
        "bytes": np.frombuffer(b"\x01\xff\x00", np.uint8),
        "table": np.arange(6, dtype=np.float32).reshape(2, 3).T.copy(),
    }
    about = {"round": 3, "numbers": {"threshold": 0.1}, "none": None}
    read, found = read_content(content_of(about, arrays))
    assert read == about
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


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
