"""The files that the page about etcd names can be used as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli import command_line

FOLDER = Path(__file__).parents[2] / "examples" / "etcd"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = documents("kubernetes.yaml")
    assert [document["kind"] for document in found] == ["Service", "StatefulSet", "Job"]
    for document in found:
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_job_of_the_manifest_is_one_of_ours() -> None:
    service, members, job = documents("kubernetes.yaml")
    (agent,) = job["spec"]["template"]["spec"]["containers"]
    args = command_line.parse([str(arg) for arg in agent["args"]], {})
    assert (args.rdzv_backend, args.training_script) == ("etcd", "train.py")
    names = [f"{members['metadata']['name']}-{rank}.{service['metadata']['name']}" for rank in range(members["spec"]["replicas"])]
    assert args.rdzv_endpoint.split(",") == names


def test_the_members_of_the_composition_know_each_other() -> None:
    (composition,) = documents("compose.yaml")
    for name, member in composition["services"].items():
        environment = member["environment"]
        assert environment["ETCD_NAME"] == name
        assert f"{name}={environment['ETCD_INITIAL_ADVERTISE_PEER_URLS']}" in environment["ETCD_INITIAL_CLUSTER"].split(",")
        assert all(port.startswith("127.0.0.1:") for port in member["ports"])
