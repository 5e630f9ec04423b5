"""What schedulers leave in the environment, and what is taken from it where the command line is silent. F29."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base import defaults, environment, report
from rallypoint.cli import arguments
from rallypoint.cli import main as cli
from rallypoint.errors import UsageError
from rallypoint.schedulers import choose
from rallypoint.schedulers.found import port_of

SRUN = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "1",
}  # fmt: skip
PORT = port_of("4242.0")
BATCH = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NODEID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OPEN_MPI_5 = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node-a-2511@1", "PMIX_RANK": "1"}
OPEN_MPI_4 = {
    **OPEN_MPI, "OMPI_MCA_ess_base_jobid": "2413297665",
    "OMPI_MCA_orte_hnp_uri": "2413297664.0;tcp://10.0.0.5,172.17.0.1:42331",
}  # fmt: skip
PBS = {"PBS_NODEFILE": "/spool/nodes", "PBS_JOBID": "77.server", "PBS_TASKNUM": "2"}
LSF = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "batch 1 h1 8 h2 8", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"}
FLUX = {"FLUX_JOB_ID": "f23", "FLUX_JOB_NNODES": "2", "FLUX_JOB_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}
POD = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
FILES = {
    "/spool/nodes": "p1\np1\np2.site\n",
    "/spool/hosts": "h1\nh1\nh2\n",
    "/etc/hosts": "127.0.0.1 localhost\n10.1.2.3\ttrain-2.svc.space.svc.cluster.local\ttrain-2\n",
}


def read_file(path: str) -> str:
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", path) from None


def taken(environ: Mapping[str, str], given: str = "", backend: str = "static", most: int = 1) -> dict[str, str]:
    found = choose.find("auto", environ, read_file)
    assert found is not None
    return choose.missing(found, given.split(), backend, most)


def meeting(nodes: int, run_id: str, endpoint: str = "", **more: str) -> dict[str, str]:
    elastic = {"rdzv_endpoint": endpoint, "rdzv_backend": "c10d"} if endpoint else {}
    return {"nnodes": str(nodes), **({"rdzv_id": run_id} if run_id else {}), **elastic, **more}


SLURM_JOB = meeting(3, "slurm-4242.0", f"n1:{PORT}")
HET = {**SRUN, "SLURM_JOB_ID": "4243", "SLURM_JOB_ID_HET_GROUP_0": "4242", "SLURM_HET_SIZE": "2"}


@pytest.mark.parametrize(("environ", "values"), [
    (SRUN, SLURM_JOB),
    ({**SRUN, "SLURM_GPUS_ON_NODE": "8"}, {**SLURM_JOB, "nproc_per_node": "8"}),
    ({**SRUN, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, {**SLURM_JOB, "nproc_per_node": "2"}),
    ({**SRUN, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}, SLURM_JOB),
    ({**SRUN, "SLURM_GPUS_ON_NODE": "0"}, SLURM_JOB),
    ({**SRUN, "CUDA_VISIBLE_DEVICES": "0,1"}, SLURM_JOB),
    ({**SRUN, "SLURM_RESTART_COUNT": "2"}, {**SLURM_JOB, "rdzv_id": "slurm-4242.0-r2"}),
    ({**SRUN, "SLURM_RESTART_COUNT": "0"}, SLURM_JOB),
    ({**SRUN, "SLURM_ARRAY_JOB_ID": "4240", "SLURM_ARRAY_TASK_ID": "2"}, SLURM_JOB),
    (HET, SLURM_JOB),
    ({**SRUN, "SLURM_STEP_NUM_NODES": ""}, SLURM_JOB),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, SLURM_JOB),
    ({**SRUN, "SLURM_STEP_ID": "3"}, meeting(3, "slurm-4242.3", f"n1:{port_of('4242.3')}")),
    ({**SRUN, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
     meeting(1, "slurm-4242.0")),
    (BATCH, {}),
    ({**BATCH, "SLURM_GPUS_ON_NODE": "8"}, {}),
    (OPEN_MPI_5, meeting(2, "mpi-prterun-node-a-2511-1", f"node-a:{port_of('prterun-node-a-2511@1')}")),
    (OPEN_MPI_4, meeting(2, "mpi-2413297665", f"10.0.0.5:{port_of('2413297665')}")),
    ({**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::1]:42331"},
     meeting(2, "mpi-2413297665", f"[fe80::1]:{port_of('2413297665')}")),
    ({**OPEN_MPI_5, **BATCH}, meeting(2, "mpi-prterun-node-a-2511-1", f"n1:{port_of('prterun-node-a-2511@1')}")),
    ({**OPEN_MPI_5, **PBS}, meeting(2, "mpi-prterun-node-a-2511-1", f"p1:{port_of('prterun-node-a-2511@1')}")),
    ({**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "1"}, meeting(1, "mpi-prterun-node-a-2511-1")),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, meeting(1, "")),
    ({"PMI_SIZE": "1", "PMI_RANK": "0"}, meeting(1, "")),
    (PBS, meeting(2, "pbs-77", f"p1:{port_of('77')}")),
    ({**PBS, "PBS_TASKNUM": "1"}, {}),
    ({**PBS, "PBS_JOBID": "77[3].server"}, meeting(2, "pbs-77[3]", f"p1:{port_of('77[3]')}")),
    (LSF, meeting(2, "lsf-9", f"h1:{port_of('9')}")),
    ({**LSF, "LSB_DJOB_HOSTFILE": "/spool/hosts", "LSB_MCPU_HOSTS": ""}, meeting(2, "lsf-9", f"h1:{port_of('9')}")),
    ({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "h1 8 h2 8"}, {}),
    ({**FLUX, "FLUX_JOB_NNODES": "1", "FLUX_JOB_SIZE": "1"}, meeting(1, "flux-f23")),
    (POD, {"rdzv_id": "train"}),
    ({"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "something"}, {}),
    ({"JOB_COMPLETION_INDEX": "2"}, {}),
])  # fmt: skip
def test_f29_what_is_taken_where_nothing_is_given(environ: dict[str, str], values: dict[str, str]) -> None:
    """F29: `srun rallyrun train.py` and its like need no flags."""
    assert taken(environ) == values


@pytest.mark.parametrize(("given", "backend", "most", "values"), [
    ("standalone", "static", 1, {}),
    ("nnodes", "static", 2, {"rdzv_id": "slurm-4242.0", "rdzv_endpoint": f"n1:{PORT}", "rdzv_backend": "c10d"}),
    ("nnodes", "static", 1, {"rdzv_id": "slurm-4242.0"}),
    ("rdzv_backend", "c10d", 1, SLURM_JOB),
    ("rdzv_backend rdzv_endpoint", "c10d", 1, {"nnodes": "3", "rdzv_id": "slurm-4242.0"}),
    ("rdzv_backend rdzv_endpoint rdzv_id nnodes", "c10d", 3, {}),
    ("rdzv_backend rdzv_endpoint", "etcd", 1, {"nnodes": "3", "rdzv_id": "slurm-4242.0"}),
    ("rdzv_id", "static", 1, {name: value for name, value in SLURM_JOB.items() if name != "rdzv_id"}),
    ("master_addr", "static", 1, {}),
    ("node_rank nnodes", "static", 3, {}),
    ("rdzv_backend", "static", 1, {}),
    ("rdzv_endpoint", "static", 1, {}),
])  # fmt: skip
def test_what_is_given_wins(given: str, backend: str, most: int, values: dict[str, str]) -> None:
    assert taken(SRUN, given, backend, most) == values
    assert "nproc_per_node" not in taken({**SRUN, "SLURM_GPUS_ON_NODE": "8"}, f"{given} nproc_per_node", backend, most)


@pytest.mark.parametrize(("environ", "most", "refusal"), [
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 1, "`srun --ntasks-per-node=1 rallyrun --nproc-per-node 2 ...`"),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, 1, "SLURM_STEP_TASKS_PER_NODE is 2,1(x2): 4 launchers on 3 nodes"),
    ({**SRUN, "SLURM_STEP_NUM_NODES": "many"}, 1, "SLURM_STEP_NUM_NODES is 'many'"),
    ({**SRUN, "SLURM_STEP_NUM_NODES": "0"}, 1, "SLURM_STEP_NUM_NODES is '0'"),
    ({**SRUN, "SLURM_STEP_NUM_NODES": "2"}, 1, "SLURM_STEP_NUM_NODES is 2, but SLURM_STEP_NODELIST names 3"),
    ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, 1, "SLURM_STEP_NODELIST: brackets that do not match"),
    ({**SRUN, "SLURM_GPUS_ON_NODE": "a"}, 1, "SLURM_GPUS_ON_NODE is 'a'"),
    ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, "`mpirun --map-by ppr:1:node rallyrun --nproc-per-node 4 ...`"),
    (OPEN_MPI, 1, "mpirun does not say where they are; add --rdzv-backend c10d --rdzv-endpoint"),
    ({"PMI_SIZE": "2"}, 1, "mpiexec does not say where they are"),
    ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, 1, "`mpiexec -ppn 1 rallyrun --nproc-per-node 4 ...`"),
    ({"PBS_NODEFILE": "/nowhere"}, 1, "PBS_NODEFILE: /nowhere cannot be read: No such file"),
    ({**LSF, "JSM_NAMESPACE_SIZE": "16"}, 1, "`jsrun -r 1 rallyrun ...`"),
    (FLUX, 1, "Flux does not say which nodes these are"),
    ({**FLUX, "FLUX_JOB_SIZE": "8"}, 1, "`flux run --tasks-per-node=1 rallyrun ...`"),
    ({**POD, "HOSTNAME": "else-2"}, 2, "headless Service"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_the_variable_s_name(environ: dict[str, str], most: int, refusal: str) -> None:
    with pytest.raises(UsageError) as caught:
        taken(environ, "nnodes" if most > 1 else "", most=most)
    assert refusal in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pods_of_an_indexed_job_find_the_first_by_its_full_name() -> None:
    assert taken(POD, "nnodes", most=4) == {
        "rdzv_id": "train", "rdzv_endpoint": "train-0.svc.space.svc.cluster.local:29400", "rdzv_backend": "c10d",
    }  # fmt: skip


@pytest.mark.parametrize(("environ", "advice"), [
    (BATCH, "`srun rallyrun ...`"),
    ({**PBS, "PBS_TASKNUM": "1"}, "`pbsdsh -u -- rallyrun ...`"),
    ({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "h1 8 h2 8"}, "`jsrun -r 1 rallyrun ...`"),
    ({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, ""),
])  # fmt: skip
def test_a_batch_script_of_several_nodes_gets_advice(environ: dict[str, str], advice: str) -> None:
    found = choose.find("auto", environ, read_file)
    assert found is not None
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)


@given(st.integers(1, 10**9), st.integers(0, 50))
def test_ports_of_jobs_side_by_side_differ(job: int, step: int) -> None:
    ports = {port_of(str(job + more)) for more in range(100)}
    assert len(ports) == 100
    assert all(20_000 <= port < 29_000 for port in {*ports, port_of(f"{job}.{step}")})
    assert port_of(f"{job}.{step}") == port_of(f"{job}.{step}")


# --- as the command line has it --------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> Any:
    lines: list[str] = []
    report.set_sink(lambda _level, text: lines.append(text))
    yield lines
    report.set_sink(None)


def configured(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str], *flags: str) -> Any:
    monkeypatch.setattr(environment, "own", dict(environ))
    return arguments.config_from_args(cli.parse_args([*flags, "--no-python", "true"]))[0]


def test_one_line_says_what_was_taken_and_from_where(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    config = configured(monkeypatch, SRUN, "--nproc-per-node", "1")
    assert (config.min_nodes, config.max_nodes, config.run_id) == (3, 3, "slurm-4242.0")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", f"n1:{PORT}")
    assert said == [
        f"Slurm: 3 nodes (SLURM_STEP_NUM_NODES), meeting at n1:{PORT} (SLURM_STEP_NODELIST), run ID slurm-4242.0 (SLURM_JOB_ID)"
    ]


@pytest.mark.parametrize(("environ", "flags"), [
    (SRUN, ["--scheduler", "none"]), ({**SRUN, "PET_SCHEDULER": "none"}, []), (SRUN, ["--standalone"]), ({}, []),
])  # fmt: skip
def test_nobody_is_asked_where_that_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, said: list[str], environ: dict[str, str], flags: list[str]
) -> None:
    config = configured(monkeypatch, environ, *flags)
    assert (config.max_nodes, config.rdzv_endpoint) == (1, defaults.STANDALONE_ENDPOINT)
    assert said == []


def test_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--scheduler flux: FLUX_JOB_ID is not set"):
        configured(monkeypatch, SRUN, "--scheduler", "flux")
    with pytest.raises(UsageError, match="SLURM_GPUS_ON_NODE"):
        configured(monkeypatch, {**SRUN, "SLURM_GPUS_ON_NODE": "-1"})


def test_a_batch_script_is_told_on_the_screen(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    configured(monkeypatch, BATCH)
    assert len(said) == 1
    assert "runs on one node only" in said[0]


def test_arguments_of_a_program_s_own_parser_are_left_alone(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(environment, "own", dict(SRUN))
    args = cli.parse_args(["--standalone", "--no-python", "true"])
    del args.from_flags, args.from_environment, args.standalone
    assert arguments.config_from_args(args)[0].max_nodes == 1
    assert said == []
