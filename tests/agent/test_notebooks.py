"""What a user of a notebook sees of a launch that fails: his own lines, and what is wrong, in as few lines as that takes.

The cells are run by IPython itself, in a process of its own, one after the other as in a notebook.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="the extra [test] has it")
pytest.importorskip("cloudpickle", reason="the extra [test] has it")

pytestmark = pytest.mark.timeout(300)  # the first of them runs all cells

CELLS = {
    "names": "import os, signal, time\nimport rallypoint\nfrom rallypoint import LaunchConfig, elastic_launch",
    "functions": (
        "def look_up(name):\n    return {}[name]  # the line that fails\n\n"
        "def work(name):\n    return look_up(name)  # the line that calls it\n\n"
        "def interrupt(pid):\n    os.kill(pid, signal.SIGINT)\n    time.sleep(60)"
    ),
    "good": "rallypoint.launch(lambda: os.environ['RANK'], nproc=2)",
    "slow": "slow = rallypoint.launch(time.sleep, nproc=2, args=(2.5,))\nslow",
    "fails": "rallypoint.launch(work, nproc=1, args=('the key',))",
    "fails in a forkserver": "rallypoint.launch(work, nproc=1, args=('the key',), start_method='forkserver')",
    "unsendable": "rallypoint.launch(lambda: {'lock': __import__('threading').Lock()}, nproc=1)",
    "usage": "LaunchConfig(min_nodes=0, max_nodes=1, nproc_per_node=1)",
    "usage of a launch": "elastic_launch(LaunchConfig(1, 2, 1, rdzv_backend='static'), work)()",
    "ctrl-c": "rallypoint.launch(interrupt, nproc=1, args=(os.getpid(),))",
    "after that": "rallypoint.launch(lambda: 'still here', nproc=1)",
}
# Runs the cells as a notebook would, and prints for each what it showed and the classes of what it raised.
NOTEBOOK = """
import contextlib, io, json, os, sys
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor", history_length=0)
shell.history_manager.enabled = False
shell.kernel = None  # as a notebook's shell has one
shell.display_pub = CapturingDisplayPublisher(parent=shell)
shown = {}
for name, cell in json.load(sys.stdin).items():
    shown_by_shell = io.StringIO()
    with contextlib.redirect_stdout(shown_by_shell):
        result = shell.run_cell(cell, store_history=True)
    raised = type(result.error_in_exec).__mro__ if result.error_in_exec else ()
    formats, _ = shell.display_formatter.format(result.result)
    shown[name] = {
        "shown": shown_by_shell.getvalue(),
        "raised": [kind.__name__ for kind in raised],
        "value": repr(result.result),
        "kinds": [kind.__name__ for kind in type(result.result).__mro__],
        "html": formats.get("text/html", ""),
        "displayed": [(one["data"], one["update"]) for one in shell.display_pub.outputs],
    }
    shell.display_pub.outputs.clear()
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, runtime_folder: str) -> dict[str, Any]:
    """What each cell showed, what it raised, its value; and under "stderr" what the process wrote there."""
    folder = tmp_path_factory.mktemp("notebook")
    program = folder / "notebook.py"
    program.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, str(program)], input=json.dumps(CELLS), cwd=folder, capture_output=True, text=True, timeout=250,
        env={
            "PATH": "/usr/bin:/bin", "RALLYPOINT_RUNTIME_DIR": runtime_folder,
            **dict.fromkeys(("HOME", "IPYTHONDIR", "TMPDIR", "XDG_STATE_HOME"), str(folder)),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


def test_a_launch_from_a_cell(notebook: dict[str, Any]) -> None:
    """P44."""
    assert notebook["good"]["value"] == "['0', '1']"
    assert notebook["good"]["raised"] == []


def test_results_are_a_list_for_programs_and_a_table_for_people(notebook: dict[str, Any]) -> None:
    assert "list" in notebook["good"]["kinds"]
    rows = "<tr><td>0</td><td><pre>&#x27;0&#x27;</pre></td></tr><tr><td>1</td><td><pre>&#x27;1&#x27;</pre></td></tr>"
    assert notebook["good"]["html"] == f"<table><tr><th>rank</th><th>returned</th></tr>{rows}</table>"


def test_a_line_tells_how_long_the_workers_run_and_is_gone_afterwards(notebook: dict[str, Any]) -> None:
    """It is one that changes; what takes no time shows none. Workers may take so long to start and stop that this is told too."""
    displayed = notebook["slow"]["displayed"]
    texts = [data["text/plain"] for data, _ in displayed]
    assert [is_update for _, is_update in displayed] == [False] + [True] * (len(texts) - 1)
    running = [text for text in texts[:-1] if not text.startswith(("starting 2 workers · ", "stopping 2 workers"))]
    assert all(text.startswith("2 workers running · ") for text in running)
    assert len(set(running)) >= 2
    assert displayed[-1][0] == {"text/plain": ""}
    assert notebook["usage"]["displayed"] == []


@pytest.mark.parametrize("cell", ["fails", "fails in a forkserver"])
def test_f15_the_users_lines_are_shown_and_ours_are_not(notebook: dict[str, Any], cell: str) -> None:
    assert notebook[cell]["raised"][0] == "ChildFailedError"
    shown = notebook[cell]["shown"]
    assert shown.startswith("ChildFailedError:\n=====")
    for line in ("return {}[name]  # the line that fails", "return look_up(name)  # the line that calls it"):
        assert f"      {line}\n" in shown
    assert "function_worker" not in shown
    assert "error_files.py" not in shown


def test_f15_so_does_the_traceback_of_the_worker_itself(notebook: dict[str, Any]) -> None:
    told = notebook["stderr"]
    assert "    return {}[name]  # the line that fails\n" in told
    assert "/rallypoint/" not in told.replace(str(Path(sys.executable)), "")


def test_f14_a_result_that_cannot_be_sent_is_one_sentence(notebook: dict[str, Any]) -> None:
    shown = notebook["unsendable"]["shown"]
    assert "TypeError: <lambda> returned a dict on rank 0, which cannot be sent to the launcher (cannot pickle '_thread" in shown
    assert "function_worker" not in shown + notebook["stderr"]


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("usage", "UsageError: min_nodes must be a whole number of 1 or more, not 0\n"),
        (
            "usage of a launch",
            "UsageError: rdzv_endpoint is empty: the static back end needs the master's address and port, as host:port\n",
        ),
    ],
)
def test_f16_a_usage_error_is_one_line(notebook: dict[str, Any], cell: str, line: str) -> None:
    assert notebook[cell]["shown"] == line


def test_f16_ctrl_c_is_one_line_and_a_keyboard_interrupt(notebook: dict[str, Any]) -> None:
    """A program that was written for torch catches it as a SignalException, any other as a KeyboardInterrupt."""
    assert {"KeyboardInterrupt", "SignalException"} <= set(notebook["ctrl-c"]["raised"])
    assert notebook["ctrl-c"]["shown"] == "KeyboardInterrupt\n"
    assert notebook["after that"]["value"] == "['still here']"
