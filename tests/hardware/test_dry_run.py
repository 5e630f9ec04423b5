"""P40: the plan that is printed instead of a start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hardware.machines import epyc

from rallypoint import affinity
from rallypoint.affinity import AffinityMode, NumaOptions
from rallypoint.agent.config import LaunchConfig
from rallypoint.cli.dry_run import describe
from rallypoint.errors import UsageError
from rallypoint.hardware import devices
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from rallypoint.protocol.worker_plan import Group, WorkerRanks, plan_worker

SECRET = "hunter2"


def config(numa_options: NumaOptions | None = None, **changes: Any) -> LaunchConfig:
    settings = {"rdzv_backend": "c10d", "rdzv_endpoint": "node0:29400", "run_id": "job-7", "max_restarts": 0, "role": "trainer"}
    sizes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}
    return LaunchConfig(**{**sizes, **settings, "numa_options": numa_options, **changes})


def rows(text: str, part: str) -> dict[str, list[str]]:
    """The rows of one part of the plan by their names."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.split(f"\n{part}\n")[1].split("\n\n", maxsplit=1)[0].splitlines():
        name = line[2:16].strip() or name
        found.setdefault(name, []).append(line[16:])
    return found


def environment(text: str, rank: int = 0) -> dict[str, str]:
    return dict(line.split("=", 1) for line in rows(text, f"worker {rank}")["environment"])


def test_p40_the_whole_plan_of_a_small_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects={0: Std.ERR}, tee={0: Std.OUT})
    text = describe(
        config(nproc_per_node=1, logs_specs=logs), "python", ["-u", "train.py", "--lr", "0.1", "--rank=${local_rank}"]
    )
    assert (
        text
        == f"""\
Nothing is started; this is the plan for this node.

job
  run id        job-7
  nodes         1
  workers here  1, role trainer
  rendezvous    c10d at node0:29400
  listens       the store of the workers: 127.0.0.1, any free port; whoever reaches it; torch's protocol has no secret
                commands such as ps and stop: a socket in a folder of this user's own; the same user, as the kernel says
  restarts      0 at most
  time-outs     SIGKILL 30 s after the first signal, given up 10 s after SIGKILL, exit barrier 300 s
  signals       SIGTERM,SIGINT,SIGHUP,SIGQUIT, passed on to the workers

worker 0
  command       python -u train.py --lr 0.1 --rank=0
  environment   LOCAL_RANK=0
                RANK=0
                GROUP_RANK=0
                ROLE_RANK=0
                ROLE_NAME=trainer
                LOCAL_WORLD_SIZE=1
                WORLD_SIZE=1
                GROUP_WORLD_SIZE=1
                ROLE_WORLD_SIZE=1
                MASTER_ADDR=<known when the nodes have met>
                MASTER_PORT=<known when the nodes have met>
                TORCHELASTIC_RESTART_COUNT=0
                RALLYPOINT_GENERATION=1
                TORCHELASTIC_MAX_RESTARTS=0
                TORCHELASTIC_RUN_ID=job-7
                TORCHELASTIC_USE_AGENT_STORE=<chosen at the start>
                TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT
                TORCH_NCCL_ASYNC_ERROR_HANDLING=1
                TORCHELASTIC_ERROR_FILE={tmp_path}/logs/job-7_<random>/attempt_<n>/0/error.json
  stdout        {tmp_path}/logs/job-7_<random>/attempt_<n>/0/stdout.log and the console
  stderr        {tmp_path}/logs/job-7_<random>/attempt_<n>/0/stderr.log
  CPUs          0-2,5: all that may be used, as no binding was asked for
"""
    )
    assert not (tmp_path / "logs").exists()


def test_p40_every_plan_is_the_same_twice() -> None:
    made = config()
    assert describe(made, "python", ["x"]) == describe(made, "python", ["x"]) == describe(config(), "python", ["x"])


def test_p40_of_several_nodes_ranks_are_relative() -> None:
    text = describe(config(min_nodes=2, max_nodes=4, rdzv_configs={"join_timeout": 60}, max_restarts=3), "python", [])
    assert rows(text, "job")["nodes"] == ["2 to 4"]
    assert rows(text, "job")["settings"][0].startswith("join_timeout 60 s (--rdzv-conf), last_call_timeout 30 s, ")
    assert rows(text, "job")["restarts"] == ["3 at most, the second after 1 s"]
    second = environment(text, 1)
    assert second["RANK"] == second["ROLE_RANK"] == "<first of this node> + 1"
    assert second["LOCAL_RANK"] == "1"
    assert second["WORLD_SIZE"] == second["GROUP_RANK"] == second["GROUP_WORLD_SIZE"] == "<known when the nodes have met>"


def test_p40_of_static_nodes_more_is_known() -> None:
    static = {"rdzv_backend": "static", "rdzv_endpoint": "10.0.0.1:29500", "rdzv_configs": {"rank": 1, "timeout": 77}}
    text = describe(config(min_nodes=2, max_nodes=2, **static), "python", [])
    env = environment(text)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert "rendezvous 77 s" in rows(text, "job")["time-outs"][0]


def test_p40_the_memory_that_is_taken_beside_the_workers_own() -> None:
    assert "memory" not in rows(describe(config(), "python", []), "job")
    standby = "standby: for each worker what its program holds when it calls ready(), on GPUs too; said when they wait"
    assert rows(describe(config(standby=True), "python", []), "job")["memory"] == [standby]
    kept = {"checkpoint_memory": 40 << 30}
    assert rows(describe(config(**kept), "python", []), "job")["memory"] == [
        "snapshots: 40.0 GiB at most; 2 of up to 10.0 GiB for each worker"
    ]
    assert rows(describe(config(**kept, standby=True, checkpoint_copies=1), "python", []), "job")["memory"] == [
        standby,
        "snapshots: 40.0 GiB at most; 3 of up to 3.3 GiB for each worker, which standby shares;"
        " 20.0 GiB for copies of another node's",
    ]


def test_p40_a_function_goes_by_its_qualified_name() -> None:
    text = describe(config(start_method="forkserver"), describe, ["a", 3, [SECRET]])
    assert rows(text, "worker 0")["function"] == ["rallypoint.cli.dry_run.describe('a', <int>, <list>), started by forkserver"]


def test_p40_the_cpus_of_each_worker_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(epyc(tmp_path / "root").root)
    real = affinity.plan_binding
    monkeypatch.setattr(affinity, "plan_binding", lambda mode, envs: real(mode, envs, root, range(32)))
    text = describe(config(NumaOptions(AffinityMode.CORE_COMPLEX), nproc_per_node=6), "python", [])
    assert rows(text, "worker 0")["CPUs"] == ["16-19: last-level cache 1 of 4 of node 1; AMD GPU 0000:c1:00.0 is on node 1"]
    assert rows(text, "worker 2")["CPUs"] == ["0-3: last-level cache 1 of 4 of node 0; AMD GPU 0001:23:00.0 is on node 0"]
    one_cache = describe(config(NumaOptions(AffinityMode.CORE_COMPLEX), nproc_per_node=10), "python", [])
    assert "4 last-level caches for 5 workers" in one_cache.splitlines()[-1]


def test_p40_a_binding_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="physical core"):
        describe(config(NumaOptions(AffinityMode.EXCLUSIVE), nproc_per_node=5000), "python", [])
    text = describe(config(NumaOptions(AffinityMode.EXCLUSIVE, True), nproc_per_node=5000), "python", [])
    assert rows(text, "worker 4999")["CPUs"] == ["not bound, see below"]
    assert text.splitlines()[-1].startswith("exclusive: ")


def test_p40_virtual_local_ranks_see_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    text = describe(config(virtual_local_rank=True), "python", ["--shard=${local_rank}"])
    assert (environment(text, 1)["LOCAL_RANK"], environment(text, 1)["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert rows(text, "worker 1")["command"] == ["python --shard=1"]


def test_p40_with_amd_devices_both_masks_leave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "mask_variables", lambda: ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    env = environment(describe(config(virtual_local_rank=True), "python", []), 1)
    assert (env["HIP_VISIBLE_DEVICES"], env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("3", "3", "0")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--password", SECRET],
        [f"--api-key={SECRET}"],
        [f"--db=postgres://me:{SECRET}@host/db"],
        ["env", f"WANDB_API_KEY={SECRET}", "python"],
        ["--hf_token", SECRET, "--lr", "1"],
    ],
)
def test_a_secret_in_the_arguments_is_not_shown(arguments: list[str]) -> None:
    for entry in ("python", describe):
        text = describe(config(), entry, arguments)
        assert SECRET not in text
        assert "<hidden>" in text


def test_no_secret_of_the_job_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_SECRET", SECRET * 4)
    made = config(
        notify=[f"https://hooks.example/{SECRET}", "sh -c true"],
        min_nodes=2, max_nodes=2, rdzv_backend="etcd", rdzv_endpoint=f"https://root:{SECRET}@etcd:2379",
        rdzv_configs={"password": SECRET}, worker_env={"HF_TOKEN": SECRET, "MAX_TOKENS": "512"},
    )  # fmt: skip
    text = describe(made, "python", ["--max-tokens", "512", "--tokenizer", "bpe"])
    assert SECRET not in text
    assert environment(text)["HF_TOKEN"] == "<hidden>"
    assert environment(text)["MAX_TOKENS"] == "512"
    assert rows(text, "worker 0")["command"] == ["python --max-tokens 512 --tokenizer bpe"]
    assert "password <hidden>" in rows(text, "job")["settings"][0]
    assert rows(text, "job")["told"] == ["https://hooks.example, sh"]


def test_p40_logs_of_other_kinds(tmp_path: Path) -> None:
    class Own(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            raise AssertionError("nothing may be made")

    assert rows(describe(config(logs_specs=Own()), "python", []), "job")["logs"] == ["as Own decides"]
    temporary = rows(describe(config(), "python", []), "worker 0")
    assert temporary["stdout"] == temporary["stderr"] == ["the console"]
    assert temporary["environment"][-1].endswith("/rallypoint_<random>/job-7_<random>/attempt_<n>/0/error.json")
    nowhere = rows(describe(config(logs_specs=DefaultLogsSpecs(os.devnull, tee=Std.OUT)), "python", []), "worker 0")
    assert nowhere["stdout"] == ["/dev/null and the console"]


def test_p40_the_plan_is_what_a_start_would_use() -> None:
    """The environment comes from the same function as the worker's own."""
    env = environment(describe(config(), sys.executable, []), 1)
    group = Group(
        "trainer", 0, 1, 2, "", 0, 0, 1, 0, "job-7", False, "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "host", None, False, None, {}, {}
    )  # fmt: skip
    real = plan_worker(group, WorkerRanks(1, 1, 1, 2, 2), []).env
    assert env.keys() == {*real, "TORCHELASTIC_ERROR_FILE"}
    assert {name for name in real if real[name] != env[name]} == {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
