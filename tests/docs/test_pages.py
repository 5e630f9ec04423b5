"""What the documentation says about codes, flags and names agrees with the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tools.site.navigation import GROUPS

import rallypoint
from rallypoint.cli import completion
from rallypoint.cli.command_line import OPTIONS
from rallypoint.errors import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def table_rows(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its first two lines."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_f19_the_repository_can_be_read_as_it_is() -> None:
    """Nothing is put into the pages when they are built, and every link leads to a file of the repository and a heading in it."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```$|^    .*?$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"(?<!\$)\{\w+\}", text) == [], page.name
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"
    assert not list(DOCS.glob("*.py"))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_each_page_stands_in_the_navigation_once() -> None:
    listed = [page for pages in GROUPS.values() for page in pages]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_exit_codes_are_documented() -> None:
    codes = {str(value) for name, value in vars(ExitCode).items() if name.isupper()}
    for page in (ROOT / "README.md", DOCS / "failures.md"):
        documented = {row[0] for row in table_rows(page.read_text(), "Exit codes")}
        assert documented == codes | {"128 + n"}


def test_flags_that_the_pages_name_exist() -> None:
    ours = {option.name for option in OPTIONS} | {flag for flags in completion._flags_of_commands().values() for flag in flags}
    not_ours = {"--strict", "--lr", "--n", "--nproc", "--pdeathsig", "--unix-socket", "--verbose"}
    not_ours |= {"--enable-grpc-gateway", "--auto-compaction-retention"}  # etcd's
    not_ours |= {"--cpus-per-task", "--gpus-per-node", "--kill-on-bad-exit", "--no-kill", "--no-requeue"}  # Slurm's
    not_ours |= {"--nodes", "--ntasks-per-node", "--signal"}
    not_ours |= {"--map-by", "--tasks-per-node"}  # Open MPI's and Flux's
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
        assert named - not_ours <= ours, page.name


def test_every_difference_from_torchrun_has_its_reason() -> None:
    rows = table_rows((DOCS / "coming-from-torchrun.md").read_text(), "Deliberate differences")
    assert [row for row in rows if len(row) != 4 or not all(row)] == []


def test_the_page_about_the_api_names_what_there_is() -> None:
    rows = table_rows((DOCS / "python-api.md").read_text(), "Names")
    documented = [(row[1].strip("`"), name) for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert [pair for pair in documented if not hasattr(importlib.import_module(pair[0]), pair[1])] == []
    assert {name for module, name in documented if module == "rallypoint"} == set(rallypoint.__all__) - {"__version__"}


def test_every_module_is_on_the_map() -> None:
    page = (DOCS / "tour.md").read_text()
    mapped = {name for row in table_rows(page, "The map") for name in re.findall(r"`(\w+)/?`", row[0])}
    package = Path(rallypoint.__file__).parent
    parts = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == mapped


def test_the_walk_through_a_failure_is_short_and_names_what_there_is() -> None:
    rows = table_rows((DOCS / "tour.md").read_text(), "A walk: one failure over two nodes")
    assert [row[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    assert len(rows) <= 12
    for _, shape, _, place in rows:
        module = importlib.import_module("rallypoint." + place.strip("`").removesuffix(".py").replace("/", "."))
        assert [name for name in re.findall(r"^(?:an? )?`(\w+)`", shape) if not hasattr(module, name)] == []
