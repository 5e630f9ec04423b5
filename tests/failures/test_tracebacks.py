"""Finding the last traceback in text that was not made to be parsed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.tracebacks import Frame, find_fatal_error, find_traceback, headline, outside_traceback

PLAIN = textwrap.dedent("""\
    Traceback (most recent call last):
      File "/job/train.py", line 12, in <module>
        main()
      File "/job/train.py", line 8, in main
        raise ValueError("boom")
    ValueError: boom
    """)
PLAIN_FRAMES = (
    Frame("/job/train.py", 12, "<module>", "main()"),
    Frame("/job/train.py", 8, "main", 'raise ValueError("boom")'),
)


def run_python(source: str) -> str:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60).stderr


def prefixed(prefix: str, text: str) -> str:
    return "".join(prefix + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PLAIN, id="alone"),
        pytest.param("INFO: epoch 1\n" + PLAIN + "INFO: bye\nsome more output\n", id="output before and after"),
        pytest.param(PLAIN.replace("\n", "\r\n"), id="carriage returns"),
        pytest.param("\r 10%|#    | 1/10\r 20%|##   | 2/10" + PLAIN, id="progress bar without a newline"),
        pytest.param(prefixed("[rank0]: ", PLAIN), id="rank prefix"),
        pytest.param(prefixed("[default0]:[rank0]: ", PLAIN), id="two prefixes"),
        pytest.param("".join(f"12:00:0{n} | {x}" for n, x in enumerate(PLAIN.splitlines(True))), id="times as prefix"),
        pytest.param(PLAIN.replace("ValueError: boom", "\x1b[1;35mValueError\x1b[0m: \x1b[35mboom\x1b[0m"), id="colours"),
        pytest.param(PLAIN.replace("    raise", "    [W] noise.cpp:12 hello\n    raise"), id="indented noise"),
        pytest.param(PLAIN.replace('  File "/job/train.py", line 8', 'WARNING: x\n  File "/job/train.py", line 8'), id="noise"),
        pytest.param(PLAIN.replace('("boom")\n', '("boom")\n    ^^^^^^^\n').replace("n()\n", "n()\n    ~~~~^^\n"), id="marks"),
        pytest.param(PLAIN + "\nTraceback (most recent call last):\n" + '  File "x", line 1, in y\n', id="cut at the end"),
        pytest.param(PLAIN + "ignored note\nanother note\n", id="notes"),
        pytest.param(
            PLAIN.replace("ValueError: boom", "KeyError: 'first'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + PLAIN,
            id="chained",
        ),
        pytest.param(PLAIN + "Exception ignored in: <function A.__del__>\n" + PLAIN.replace("boom", "other"), id="finaliser"),
        pytest.param(
            PLAIN + "Exception in thread Thread-1 (f):\n" + PLAIN.replace("boom", "a")
            + "\nThe above exception was the direct cause of the following exception:\n\n" + PLAIN.replace("boom", "b"),
            id="chain in a thread",
        ),
    ],
)  # fmt: skip
def test_the_plain_traceback_is_found_in(text: str) -> None:
    found = find_traceback(text)
    assert found is not None
    assert (found.exception, found.type_name, found.message) == ("ValueError: boom", "ValueError", "boom")
    if "noise.cpp" not in text:
        assert found.frames == PLAIN_FRAMES


def test_a_tail_that_begins_in_the_middle() -> None:
    for cut in range(len("Traceback (most recent call last):\n")):
        found = find_traceback(PLAIN[cut:])
        assert found is not None
        assert found.frames == PLAIN_FRAMES
    in_the_first_frame = find_traceback(PLAIN[50:])
    assert in_the_first_frame is not None
    assert in_the_first_frame.frames == PLAIN_FRAMES[1:]
    assert in_the_first_frame.message == "boom"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "hello",
        "ValueError: only talk",
        'see File "x.py", line 3\nValueError: no',
        "Traceback (most recent call last):",
        'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    call()\n',
        "Traceback (most recent call last):\n" + "not a frame!\n" * 20 + "ValueError: too far away\n",
    ],
)
def test_no_traceback(text: str) -> None:
    assert find_traceback(text) is None


def test_frames_inside_a_message_are_no_traceback_of_their_own() -> None:
    found = find_traceback(
        PLAIN + '\nfrom user code:\n  File "model.py", line 3, in forward\n    x @ y\nSet TRACE=1 to see more: yes\n'
    )
    assert found is not None
    assert found.message == "boom"


def test_a_traceback_inside_a_message_wins() -> None:
    """So it is when a pool of processes hands on what its child raised: the child's frames are the ones that help."""
    outer = PLAIN.replace("ValueError: boom", "pool.ProcessRaisedException: \n\n-- Process 0 ended with this error:")
    found = find_traceback(outer + PLAIN.replace("boom", "inner"))
    assert found is not None
    assert found.exception == "ValueError: inner"


def test_a_message_that_begins_with_an_empty_line_is_spoken_for_by_its_first_words() -> None:
    found = find_traceback(PLAIN.replace(": boom", ": \n\nArrays are not equal"))
    assert found is not None
    assert found.exception == "ValueError: Arrays are not equal"


def test_only_a_thread_failed() -> None:
    found = find_traceback("Exception in thread Thread-1 (f):\n" + PLAIN)
    assert found is not None
    assert found.message == "boom"


def test_what_is_left_beside_the_traceback() -> None:
    assert outside_traceback("\nINFO: before\n" + PLAIN + "second line of the message\n\n") == [
        "INFO: before",
        "second line of the message",
    ]
    assert outside_traceback(PLAIN) == []
    assert outside_traceback("no traceback\n") == ["no traceback"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: boom\nmore", ("ValueError: boom", True)),
        ("mod.Error: =====\nFAILED: rank 2\n-----", ("mod.Error: FAILED: rank 2", True)),
        ("something went wrong", ("something went wrong", False)),
        ("", ("", False)),
        ("\n----\n", ("", False)),
    ],
)
def test_headline(text: str, expected: tuple[str, bool]) -> None:
    assert headline(text) == expected


def test_a_script_that_cannot_be_parsed_has_no_header(tmp_path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("def f(:\n    pass\n")
    stderr = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60).stderr
    found = find_traceback("INFO: an earlier line\n" + PLAIN + stderr)
    assert found is not None
    assert found.type_name == "SyntaxError"
    assert found.frames == (Frame(str(script), 1, "", "def f(:"),)


def test_an_import_of_a_module_that_cannot_be_parsed(tmp_path) -> None:
    (tmp_path / "bad.py").write_text("if x\n")
    found = find_traceback(run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import bad"))
    assert found is not None
    assert found.type_name == "SyntaxError"
    assert found.frames[-1] == Frame(str(tmp_path / "bad.py"), 1, "", "if x")
    assert found.frames[0].function == "<module>"


def test_endless_recursion() -> None:
    found = find_traceback(run_python("def f(): f()\nf()"))
    assert found is not None
    assert found.type_name == "RecursionError"
    assert found.message.startswith("maximum recursion depth exceeded")
    assert {frame.function for frame in found.frames} == {"<module>", "f"}


def test_exceptions_without_a_message_and_with_a_qualified_name() -> None:
    found = find_traceback(run_python("raise KeyboardInterrupt"))
    assert found is not None
    assert (found.exception, found.message) == ("KeyboardInterrupt", "")
    found = find_traceback(run_python("import json; json.loads('{')"))
    assert found is not None
    assert found.type_name == "json.decoder.JSONDecodeError"
    local = find_traceback(run_python("def f():\n class E(Exception): pass\n return E\nraise f()('x')"))
    assert local is not None
    assert local.exception in ("__main__.f.<locals>.E: x", "f.<locals>.E: x")


def test_an_exception_in_a_thread_and_then_in_the_main_one() -> None:
    found = find_traceback(
        run_python(
            """
            import threading, atexit
            class Late:
                def __del__(self): raise OSError("in a finaliser")
            late = Late()
            def f(): raise TypeError("in a thread")
            t = threading.Thread(target=f); t.start(); t.join()
            atexit.register(lambda: 1 / 0)
            raise ValueError("the one that ended it")
            """
        )
    )
    assert found is not None
    assert found.exception == "ValueError: the one that ended it"


GROUP = """
def f(n):
    try:
        raise ValueError(f"part {n}")
    except ValueError as e:
        return e
try:
    raise KeyError("before")
except KeyError:
    raise ExceptionGroup("many", [f(1), ExceptionGroup("nested", [f(2), TypeError("bare")])])
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_an_exception_group_is_named_itself_and_all_of_it_is_taken() -> None:
    stderr = run_python(GROUP)
    for text in (stderr, prefixed("[rank3]: ", stderr)):
        found = find_traceback("INFO: before\n" + text + "INFO: after\n")
        assert found is not None
        assert found.exception == "ExceptionGroup: many (2 sub-exceptions)"
        assert [frame.function for frame in found.frames] == ["<module>"]
        assert outside_traceback(text + "INFO: after\n")[-1] == "INFO: after"
        assert not any("part 1" in line for line in outside_traceback(text))


def test_the_fault_handlers_stack() -> None:
    stderr = run_python(
        """
        import faulthandler, os, signal
        faulthandler.enable()
        def inner(): os.kill(os.getpid(), signal.SIGSEGV)
        def outer(): inner()
        outer()
        """
    )
    found = find_fatal_error("some output\n" + stderr)
    assert found is not None
    assert found.exception == "Fatal Python error: Segmentation fault"
    assert [frame.function for frame in found.frames] == ["<module>", "outer", "inner"]
    assert find_fatal_error(PLAIN) is None


def raise_nested(error: BaseException, depth: int, chained: bool) -> None:
    if depth:
        raise_nested(error, depth - 1, chained)
    if chained:
        try:
            {}["missing"]
        except KeyError as cause:
            raise error from cause
    raise error


CATEGORIES_OF_LINES = ("Cc", "Cs", "Zl", "Zp")
texts = st.text(st.characters(exclude_categories=CATEGORIES_OF_LINES), max_size=60)
noise_lines = st.lists(texts.filter(lambda line: "Traceback" not in line and "File" not in line), max_size=5)
messages = st.lists(texts, max_size=3).map("\n".join).filter(lambda text: not text or any(map(str.isalnum, text.split("\n")[0])))
prefixes = st.sampled_from(["", "[rank0]: ", "[default3]:", "2026-01-31 23:59:59 ERROR "])


@given(
    error_type=st.sampled_from(
        [ValueError, OSError, RuntimeError, AssertionError, KeyboardInterrupt, subprocess.SubprocessError]
    ),
    message=messages,
    depth=st.integers(0, 8),
    chained=st.booleans(),
    before=noise_lines,
    after=noise_lines,
    prefix=prefixes,
    unfinished_line=st.sampled_from(["", "50%|#####     | 1/2"]),
)
def test_any_exception_is_found_in_any_noise(
    *,
    error_type: type[BaseException],
    message: str,
    depth: int,
    chained: bool,
    before: list[str],
    after: list[str],
    prefix: str,
    unfinished_line: str,
) -> None:
    """P01: whatever was raised, and whatever was written around it, its type and message are found."""
    try:
        raise_nested(error_type(message), depth, chained)
    except BaseException as error:
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    start = "".join(line + "\n" for line in before) + ("" if prefix else unfinished_line)
    text = start + prefixed(prefix, shown) + "".join(line + "\n" for line in after)
    found = find_traceback(text)
    assert found is not None
    assert found.type_name.endswith(error_type.__name__)
    assert found.message == message.partition("\n")[0].rstrip()
    assert found.frames[-1].function == "raise_nested"
    assert found.frames[-1].source.startswith("raise error")


pieces = st.sampled_from([*PLAIN.splitlines(keepends=True), "  + Exception Group " + PLAIN, "  | ", "\r", "\x1b[0m", "[rank0]: "])


@given(st.lists(pieces | st.text(max_size=8), max_size=30).map("".join))
def test_no_text_makes_it_raise(text: str) -> None:
    for found in (find_traceback(text), find_fatal_error(text)):
        assert found is None or (found.exception and found.type_name)
    assert all(line in text.replace("\r", "\n") or "\x1b" in text for line in outside_traceback(text))
    headline(text)


@pytest.mark.timeout(20)
def test_time_is_linear_in_the_length_of_the_text() -> None:
    """A tail may be made of anything; a pattern that backtracks without bound would hang the launcher."""
    hostile = [
        '  File "' * 3000 + "\n",
        ("a " * 2000 + "\n") * 50,
        "x" * 200_000,
        (PLAIN[:-18] + "\n") * 500,
        "ab." * 60_000 + "!",
    ]
    for text in hostile:
        find_traceback(text)
