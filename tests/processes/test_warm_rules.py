"""Which workers may be forks of a warm interpreter."""

from __future__ import annotations

import pytest

from rallypoint.processes.warm_rules import choose_modules, environment_of_all, head_of, program_of, read_modules, why_fresh

PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    ("given", "modules"),
    [("torch", ("torch",)), ("torch, torch.nn,numpy", ("torch", "torch.nn", "numpy")), (["a", "a", "b"], ("a", "b"))],
)
def test_modules_are_named_as_in_an_import(given: str | list[str], modules: tuple[str, ...]) -> None:
    assert read_modules(given) == modules


@pytest.mark.parametrize("given", ["torch,", "my-module", "a.b.", "torch==2", "a/b.py", "", ["torch", ""]])
def test_what_is_no_module_is_named(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="is not the name of a module"):
        read_modules(given)


def test_auto_stands_alone() -> None:
    assert read_modules("auto") == read_modules(["auto"]) == ("auto",)
    with pytest.raises(ValueError, match="auto chooses the modules itself, and stands alone"):
        read_modules("auto,torch")


MANY = [(f"m{number}", 1.0) for number in range(40)]


@pytest.mark.parametrize(
    ("imported", "left_out", "chosen"),
    [
        ([], (), []),
        ([("json", 0.02), ("torch", 2.0)], (), ["torch"]),
        ([("json", 0.02)], (), []),
        ([("numpy", 0.2), ("torch", 2.0)], (), ["numpy", "torch"]),  # as they were imported
        ([("a", 0.06), ("torch", 10.0), ("b", 0.06)], (), ["torch"]),  # the rest would not be noticed
        ([("torch", 2.0), ("numpy", 0.2)], ("torch",), ["numpy"]),
        ([("torch", 2.0), ("torch._dynamo", 1.0)], (), ["torch", "torch._dynamo"]),
        ([("torch.nn", 2.0), ("torch", 1.0)], (), ["torch.nn"]),  # which has imported torch
        ([("torchvision", 2.0), ("torch", 1.0)], (), ["torchvision", "torch"]),
        (MANY, (), [f"m{number}" for number in range(16)]),
    ],
)
def test_the_modules_that_take_longest_are_chosen(
    imported: list[tuple[str, float]], left_out: tuple[str, ...], chosen: list[str]
) -> None:
    assert [name for name, _ in choose_modules(imported, left_out)] == chosen


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["-u", "train.py", "-m"], ("", "train.py")),
        (["-u", "-m", "pkg.train", "x"], ("-m", "pkg.train")),
        (["-umpkg.train"], ("-m", "pkg.train")),
        (["-X", "dev", "-Werror", "train.py"], ("", "train.py")),
        (["-c", "pass"], ("", "")),
        (["-"], ("", "")),
        ([], ("", "")),
    ],
)
def test_what_a_command_runs(arguments: list[str], program: tuple[str, str]) -> None:
    assert program_of([PYTHON, *arguments]) == program


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (["train.py"], ["-u", "7"]),
        (["-u", "-X", "dev", "train.py"], []),
        (["-um", "pkg.train"], ["-m", "x"]),
        (["-umpkg.train"], ["x"]),
        (["-W", "error", "-c", "pass"], ["1", "2"]),
        (["-cpass"], ["1"]),
        (["-"], ["x"]),
        (["-u"], []),
        ([], []),
    ],
)
def test_the_arguments_of_a_program_are_its_own(head: list[str], rest: list[str]) -> None:
    assert head_of([PYTHON, *head, *rest]) == (PYTHON, *head)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-u", "train.py", "-I"], ""),
        (["-u", "-m", "train", "-S"], ""),
        (["-um", "train", "-S"], ""),
        (["-X", "dev", "-W", "error", "-Werror", "-B", "train.py"], ""),
        (["-c", "pass", "-E"], ""),
        (["-"], ""),
        ([], ""),
        (["-I", "train.py"], "Python's flag -I hides"),
        (["-uS", "train.py"], "Python's flag -S hides"),
        (["-X", "dev", "-E", "train.py"], "Python's flag -E hides"),
        (["-V"], "Python's flag -V hides"),
        (["--version"], "Python's flag --version hides"),
    ],
)
def test_flags_that_hide_our_folder(arguments: list[str], why: str) -> None:
    found = why_fresh([[PYTHON, *arguments]], [{}], PYTHON, is_bound=False)
    assert found.startswith(why) if why else not found


def test_another_program_is_not_forked() -> None:
    assert why_fresh([["/bin/sh", "train.sh"]], [{}], PYTHON, is_bound=False) == f"they run /bin/sh, not this Python ({PYTHON})"


def test_who_is_a_fork_already_is_told_so() -> None:
    assert why_fresh([[""]], [{}], PYTHON, is_bound=False) == "they are forks already, by their start method"


def test_variables_of_the_interpreter_must_be_the_same() -> None:
    envs = [{"PYTHONPATH": "/a", "A": "1"}, {"PYTHONPATH": "/b", "A": "2"}]
    assert why_fresh([[PYTHON, "train.py"]] * 2, envs, PYTHON, is_bound=False) == "PYTHONPATH differs between them"


@pytest.mark.parametrize(
    ("env", "is_bound", "is_fresh"), [({}, True, True), ({"OMP_NUM_THREADS": "2"}, True, False), ({}, False, False)]
)
def test_bound_workers_say_how_many_threads_they_want(env: dict[str, str], is_bound: bool, is_fresh: bool) -> None:
    assert bool(why_fresh([[PYTHON, "train.py"]], [env], PYTHON, is_bound)) == is_fresh


def test_the_keeper_knows_what_all_have_in_common_and_nobodys_place() -> None:
    envs = [{"HOME": "/h", "RANK": str(rank), "WORLD_SIZE": "2", "MINE": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(2)]
    assert environment_of_all(envs) == {"HOME": "/h", "OMP_NUM_THREADS": "1"}
    assert environment_of_all(envs[:1]) == {"HOME": "/h", "OMP_NUM_THREADS": "1", "MINE": "0"}, "one worker is all"
