"""What ``rallypoint init`` prints can be used as it is."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from rallypoint.base import defaults
from rallypoint.cli import command_line
from rallypoint.cli.init import init_main


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert init_main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_script_for_slurm(capsys: pytest.CaptureFixture[str], gpus: int) -> None:
    text = printed(capsys, "slurm", "--nodes", "4", f"--gpus={gpus}", "my train.py", "--lr", "0.1")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    assert "#SBATCH --nodes=4" in lines
    assert any(line.startswith("#SBATCH --gpus-per-node=8") for line in lines) == (gpus == 8)
    assert "srun rallyrun --max-restarts 3 --drain-signals USR1 --drain-grace 80 'my train.py' --lr 0.1" in lines


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_manifest_for_kubernetes(capsys: pytest.CaptureFixture[str], gpus: int) -> None:
    yaml, validate = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    flags = ("--image", "registry/me/it:1", "--nodes", "4", "--gpus", str(gpus), "--name", "my-job")
    service, job = yaml.safe_load_all(printed(capsys, "kubernetes", *flags, "train.py", "--text", "a: 'b'"))
    for document in (service, job):
        validate.validate(document, validate.latest_version(), strict=True)
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"] == "my-job"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod["terminationGracePeriodSeconds"] > defaults.SHUTDOWN_TIMEOUT_S
    environ = {row["name"]: row["value"] for row in agent["env"] if "value" in row}
    args = command_line.parse(agent["command"][1:], environ)
    assert (args.nnodes, args.nproc_per_node, args.training_script) == ("4", str(gpus or 1), "train.py")
    assert args.training_script_args == ["--text", "a: 'b'"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {"values": ()})["values"]}
    assert by_code == {2: "FailJob", 65: "FailJob", 79: "FailJob", 75: "Ignore", 76: "Ignore"}
    assert agent.get("resources", {}).get("limits", {}) == ({"nvidia.com/gpu": "8"} if gpus else {})


@pytest.mark.parametrize(("argv", "said"), [
    ((), "usage: rallypoint init"),
    (("pbs",), "'pbs' is not one of slurm, kubernetes"),
    (("slurm", "--nodes", "0"), "--nodes must be a number from 1"),
    (("slurm", "--nodes"), "--nodes needs a value"),
    (("slurm", "--cpus", "1"), "unknown flag --cpus"),
    (("slurm", "--image", "x"), "--image is for kubernetes"),
    (("kubernetes",), "--image is missing"),
    (("kubernetes", "--image", "a b"), "--image must name an image"),
    (("kubernetes", "--image", "a", "--name", "A_b"), "--name must be of small letters"),
])  # fmt: skip
def test_bad_input(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str) -> None:
    assert init_main(argv) == 2
    told = capsys.readouterr()
    assert (said in told.err, told.out) == (True, "")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rallypoint init slurm" in printed(capsys, "--help")
