"""Help and documentation know every flag, because they are made from one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cli import usage
from rallypoint.cli.command_line import BY_NAME, GROUPS, OPTIONS, Option


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help_and_page_list_every_flag(option: Option):
    text = usage.help_text()
    spelled = f"{option.short}, {option.name}" if option.short else option.name
    assert f"\n  {spelled}" in text
    assert all(choice in text for choice in option.choices)
    [row] = [line for line in usage.markdown().splitlines() if line.startswith(f"| `{spelled}") and f"{spelled}-" not in line]
    assert option.variable in row


def test_lines_fit_a_terminal():
    assert max(map(len, usage.help_text().splitlines())) <= 100


def test_defaults_are_shown():
    rows = {line.split("`")[1].split()[0]: line for line in usage.markdown().splitlines() if line.startswith("| `--")}
    assert "| `1:1` | `PET_NNODES` |" in rows["--nnodes"]
    assert "| `0` | `PET_NODE_RANK` |" in rows["--node-rank"]
    assert "| `300` | `PET_EXIT_BARRIER_TIMEOUT` |" in rows["--exit-barrier-timeout"]
    assert "| - | - |" in rows["--logs-specs"]


def test_the_page_is_a_table_for_each_group():
    lines = usage.markdown().splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == list(GROUPS)
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| `")]
    assert len(rows) == len(OPTIONS)
    assert all(row.count("|") == 5 for row in rows)


def test_the_page_of_flags_shows_them_as_they_are():
    """F19: to renew it, put what `markdown()` gives into the page."""
    page = Path(__file__).parents[2] / "docs" / "command-line.md"
    assert page.read_text().endswith(f"\n\n{usage.markdown().rstrip()}\n")


def test_the_table_is_sound():
    names = [name for option in OPTIONS for name in (option.name, option.short) if name]
    assert len(names) == len(set(names)) == len(BY_NAME)
    for option in OPTIONS:
        assert option.group in GROUPS
        assert option.name == "--" + option.dest.replace("_", "-")
        assert option.help.endswith(".")
        assert (option.kind == "choice") == bool(option.choices)
        assert (option.kind == "flag") == (not option.metavar)
