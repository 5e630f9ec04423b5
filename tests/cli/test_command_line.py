"""The parser: every flag, every variable, and what belongs to the script."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.torchrun_defaults import TORCHRUN_DEFAULTS

from rallypoint.base import defaults
from rallypoint.cli import command_line
from rallypoint.cli.command_line import BY_NAME, OPTIONS, Option
from rallypoint.errors import UsageError
from rallypoint.rendezvous.settings import SETTINGS

VALUED = [option for option in OPTIONS if option.kind != "flag" and not option.answers]
SWITCHES = [option for option in OPTIONS if option.kind == "flag" and not option.answers]
EXAMPLES: dict[str, tuple[str, object]] = {
    "str": ("some-text", "some-text"),
    "int": ("7", 7),
    "float": ("2.5", 2.5),
    "list": ("a,b", ["a", "b"]),
    "size": ("2K", 2048),
}
OWN_DEFAULTS = {
    "pass_exit_code": False, "log_max_size": None, "exit_barrier_timeout": 300.0, "omp_num_threads": None, "help": False,
    "version": False, "node_unit": None, "secret": None, "secret_file": None, "no_retry_exit_codes": None,
    "tls_cert": None, "tls_key": None, "tls_ca": None,
    "restart_backoff": None, "restart_window": None, "retry_hopeless": False, "max_no_progress": None,
    "worker_store": None, "worker_store_port": None, "worker_store_memory": None,
    "preload": "", "standby": False, "no_proctitle": False, "checkpoint_memory": None,
    "checkpoint_dir": None, "checkpoint_copies": 0, "checkpoint_bandwidth": None,
    "signals_to_forward": "", "drain_grace": None, "drain_signals": "", "drain_file": None, "drain_forward": "",
    "hang_timeout": None, "notify": [], "preflight": [], "health_port": None, "health_addr": "127.0.0.1", "web": False,
    "dry_run": False,
    "scheduler": "auto",
    "hosts": "", "hostfile": "", "ssh_command": "", "ssh_python": "", "ssh_env": [], "ssh_timeout": 3.5,
    "log_format": "text", "requeue": False,
}  # fmt: skip


def example(option: Option) -> tuple[str, object]:
    return (option.choices[-1], option.choices[-1]) if option.choices else EXAMPLES[option.kind]


def parse(*argv: str, **environ: str):
    return command_line.parse(argv, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        command_line.parse(argv, environ)
    return str(caught.value)


def test_defaults_are_torchruns_and_ours():
    args = vars(parse("train.py"))
    script = {"training_script": "train.py", "training_script_args": []}
    script |= {"from_flags": frozenset(), "from_environment": frozenset(), "from_scheduler": {}}
    assert args == {**TORCHRUN_DEFAULTS, **OWN_DEFAULTS, **script}


def test_a_value_that_was_given_is_told_from_a_default():
    assert not command_line.is_given(parse("train.py"), "node_rank")
    assert command_line.is_given(parse("--node-rank", "0", "train.py"), "node_rank")
    assert command_line.is_given(parse("train.py", PET_NODE_RANK="0"), "node_rank")
    assert not command_line.is_given(command_line.complete(SimpleNamespace(node_rank=0), {}), "node_rank")


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.name)
def test_every_flag_takes_its_value_in_every_spelling(option: Option):
    text, value = example(option)
    names = [option.name, "--" + option.dest, *([option.short] if option.short else [])]
    for name in names:
        for argv in ([name, text], [f"{name}={text}"]):
            assert getattr(parse(*argv, "train.py"), option.dest) == value
    if option.short:
        assert getattr(parse(option.short + text, "train.py"), option.dest) == value


@pytest.mark.parametrize("option", SWITCHES, ids=lambda option: option.name)
def test_every_switch_is_off_until_given(option: Option):
    assert getattr(parse("train.py"), option.dest) is False
    for name in (option.name, "--" + option.dest, option.short or option.name):
        assert getattr(parse(name, "train.py"), option.dest) is True
    assert "takes no value" in refusal(f"{option.name}=1", "train.py")


@pytest.mark.parametrize("option", [option for option in VALUED if option.variable], ids=lambda option: option.name)
def test_every_variable_is_the_default_and_the_command_line_wins(option: Option):
    text, value = example(option)
    args = parse("train.py", **{option.variable: text})
    assert getattr(args, option.dest) == value
    assert command_line.source(args, option.dest) == option.variable == f"PET_{option.dest.upper()}"
    args = parse(f"{option.name}={text}", "train.py", **{option.variable: "not a number, not a choice"})
    assert getattr(args, option.dest) == value
    assert command_line.source(args, option.dest) == option.name


@pytest.mark.parametrize("option", SWITCHES, ids=lambda option: option.name)
def test_every_switch_has_a_variable(option: Option):
    for text, value in (("1", True), ("true", True), ("0", False), ("No", False), ("", False)):
        assert getattr(parse("train.py", **{option.variable: text}), option.dest) is value
    assert getattr(parse(option.name, "train.py", **{option.variable: "0"}), option.dest) is True
    assert option.variable in refusal("train.py", **{option.variable: "perhaps"})


def test_two_flags_and_the_answers_have_no_variable():
    assert {o.name for o in OPTIONS if not o.variable} == {
        "--logs-specs", "--numa-binding", "--help", "--version", "--print-completion",
    }  # fmt: skip
    assert parse("train.py", PET_LOGS_SPECS="x", PET_NUMA_BINDING="x", PET_HELP="1").logs_specs is None


@pytest.mark.parametrize("name", ["PRELOAD", "CHECKPOINT_MEMORY", "NPROC_PER_NODE", "DRAIN_GRACE"])
def test_a_flags_variable_under_the_prefix_of_settings_is_told_of(name: str):
    ((found, option),) = command_line.misnamed({f"RALLYPOINT_{name}": "1", f"PET_{name}": "1", "RALLYPOINT_ELSE": "1"})
    assert (found, option.variable) == (f"RALLYPOINT_{name}", f"PET_{name}")


def test_what_settings_and_workers_have_is_no_flags_variable():
    """A worker may be a launcher itself, so a flag cannot have the name of what workers are told."""
    settings = {setting.variable: "1" for setting in SETTINGS}
    told = {name: "1" for key, name in vars(defaults).items() if key.startswith("ENV_") and isinstance(name, str)}
    assert defaults.ENV_STANDBY in told
    assert command_line.misnamed({**settings, **told}) == []


def test_an_empty_variable_says_nothing():
    assert parse("train.py", PET_MAX_RESTARTS="", PET_NNODES="").max_restarts == 0


@pytest.mark.parametrize(
    "after",
    [
        ["--nnodes", "2"],
        ["--n", "3", "--nproc_per_node=9", "-m", "--help", "--version"],
        ["--", "--tee", "3"],
        ["-t3", "", "--=", "=", "-"],
    ],
)
def test_all_after_the_script_is_the_scripts(after: list[str]):
    """P42: nothing that stands after the script's name is looked at, whatever it resembles."""
    args = parse("--nproc-per-node", "2", "train.py", *after)
    assert (args.training_script, args.training_script_args) == ("train.py", after)
    assert (args.nproc_per_node, args.nnodes, args.module, args.help) == ("2", "1:1", False, False)


@given(st.lists(st.text(max_size=8) | st.sampled_from([option.name for option in OPTIONS])))
def test_no_argument_of_the_script_is_ever_touched(after: list[str]):
    """P42, for any arguments."""
    assert parse("--standalone", "train.py", *after).training_script_args == after
    assert parse("--standalone", "--", "--odd-name", *after).training_script_args == after


def test_a_double_dash_may_stand_before_the_script():
    """P42: the explicit border between our flags and the script."""
    args = parse("--nnodes=2", "--", "-m", "--nnodes=3")
    assert (args.nnodes, args.training_script, args.training_script_args) == ("2", "-m", ["--nnodes=3"])


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_no_flag_can_be_abbreviated(name: str):
    """P42: `--n` is nobody's; torchrun reads it as one of its own."""
    for end in range(3, len(name)):
        if name[:end] not in BY_NAME:
            assert f"unknown flag {name[:end]}" in refusal(f"{name[:end]}=1", "train.py")


@pytest.mark.parametrize(
    ("flag", "written"),
    [
        ("--nproc-per-node", "--nprocs --np -np -n --num-procs --num_processes --gpus --ngpu --ngpus --n-gpus --num-gpus"),
        ("--nproc-per-node", "--ntasks-per-node --num-workers --world-size --nproc-per-nodes -nproc_per_node --nproc"),
        ("--nproc-per-node", "--gpus-per-node"),
        ("--nnodes", "--nodes --num-nodes --num_machines -N --nnode"),
        ("--node-rank", "--machine-rank --rank --noderank"),
        ("--master-addr", "--master-address --master-adr --main_process_ip"),
        ("--master-port", "--port --masterport"),
        ("--rdzv-backend", "--backend --rdzv-backed"),
        ("--rdzv-endpoint", "--endpoint --rdzv-endpoints"),
        ("--rdzv-id", "--job-id --run_id --rdzv-ids"),
        ("--max-restarts", "--max-restart --retries --max_retries --restarts"),
        ("--log-dir", "--logdir --log-folder --log_dirs"),
    ],
)  # fmt: skip
def test_f25_what_other_launchers_call_it_is_understood_as_a_question(flag: str, written: str):
    for word in written.split():
        assert f"unknown flag {word}: did you mean {flag}?" in refusal(word, "2", "t.py")


@pytest.mark.parametrize(
    ("argv", "culprit", "advice"),
    [
        (["--nproc", "4", "t.py"], "--nproc", "did you mean --nproc-per-node?"),
        (["--nproc_per_nod=4", "t.py"], "--nproc_per_nod", "did you mean --nproc-per-node?"),
        (["--standalon", "t.py"], "--standalon", "did you mean --standalone?"),
        (["--rdvz-backend", "c10d", "t.py"], "--rdvz-backend", "did you mean --rdzv-backend?"),
        (["--zzzzzz", "t.py"], "--zzzzzz", "--help"),
        (["-x", "t.py"], "-x", "--help"),
        (["-m3", "t.py"], "-m", "takes no value"),
        (["--tee"], "--tee", "needs a value"),
        (["--log-dir", "--tee", "3", "t.py"], "--log-dir", "--log-dir=--tee"),
        (["--log-dir", "--"], "--log-dir", "needs a value"),
        (["--max-restarts", "many", "t.py"], "--max-restarts", "a whole number"),
        (["--max-restarts=", "t.py"], "--max-restarts", "a whole number"),
        (["--monitor-interval", "soon", "t.py"], "--monitor-interval", "a number"),
        (["--start-method", "vfork", "t.py"], "--start-method", "spawn, fork, forkserver"),
        (["--log-max-size", "2T", "t.py"], "--log-max-size", "2G"),
        (["--numa-binding", "x", "t.py"], "--numa-binding", "core-complex"),
        (["--standalone"], "no script", "rallyrun --help"),
        (["--standalone", "--"], "no script", "rallyrun --help"),
        ([], "no script", "rallyrun --help"),
    ],
)
def test_a_mistake_is_named_with_advice(argv: list[str], culprit: str, advice: str):
    message = refusal(*argv)
    assert culprit in message
    assert advice in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("variable", "text"),
    [("PET_MAX_RESTARTS", "many"), ("PET_MONITOR_INTERVAL", "x"), ("PET_START_METHOD", "x"), ("PET_LOG_MAX_SIZE", "1X")],
)
def test_a_bad_variable_is_named(variable: str, text: str):
    message = refusal("train.py", **{variable: text})
    assert variable in message
    assert repr(text) in message


def test_a_negative_number_is_a_value():
    assert parse("--max-restarts", "-1", "train.py").max_restarts == -1


def test_a_value_with_a_dash_is_written_with_equals():
    assert parse("--role=-x", "train.py").role == "-x"


def test_the_last_of_two_wins():
    assert parse("--tee", "1", "-t", "3", "train.py").tee == "3"


def test_lists_are_separated_by_commas_and_gathered():
    args = parse("--duplicate-stdout-filters", "a,b,,c", "--duplicate-stdout-filters=d", "train.py")
    assert args.duplicate_stdout_filters == ["a", "b,c", "d"]
    assert args.training_script == "train.py"
    args = parse("--duplicate-stdout-filters=x", "train.py", PET_DUPLICATE_STDOUT_FILTERS="y")
    assert args.duplicate_stdout_filters == ["x"]


def test_defaults_are_not_shared_between_parses():
    parse("train.py").duplicate_stdout_filters.append("x")
    assert parse("train.py").duplicate_stdout_filters == []


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("2k", 2 << 10), ("500M", 500 << 20), ("1G", 1 << 30)])
def test_sizes(text: str, size: int):
    assert parse("--log-max-size", text, "train.py").log_max_size == size


@pytest.mark.parametrize(("argv", "dest", "value"), [
    (["--help"], "help", True),
    (["-h"], "help", True),
    (["--standalone", "--help", "--nonsense"], "help", True),
    (["--version"], "version", True),
    (["--print-completion", "bash"], "print_completion", "bash"),
])  # fmt: skip
def test_answers_need_no_script_and_look_at_nothing_else(argv: list[str], dest: str, value: object):
    args = parse(*argv, PET_MAX_RESTARTS="many")
    assert getattr(args, dest) == value
    assert args.training_script == ""


def test_arguments_of_another_parser_are_completed():
    class Foreign:
        def __init__(self) -> None:
            self.nnodes = "2"
            self.training_script = "train.py"

    args = command_line.complete(Foreign(), {})
    assert (args.nnodes, args.nproc_per_node, args.omp_num_threads) == ("2", "1", None)
    assert command_line.source(args, "nnodes") == "--nnodes"
