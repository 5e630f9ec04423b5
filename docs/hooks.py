"""What the documentation shows of the program's own tables is made from them whenever it is built: it cannot go stale.

These are the page of flags, and the differences between torch's names and ours on the page "Coming from torchrun".
"""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rallypoint.cli import usage
from rallypoint.compat.differences import DIFFERENCES, Difference

INTRODUCTION = """\
# Command line

    rallyrun [flags] script [script arguments]
    rallyrun [flags] -m module [module arguments]
    rallyrun [flags] --no-python program [program arguments]

`rallypoint run …` and `python -m rallypoint run …` are the same command. Rules for all flags:

- Flags go before the script. **Everything after the script's name is passed to the script**, whatever it looks like.
- Flags cannot be abbreviated, so a flag meant for the script is never mistaken for one of ours.
- `_` works in place of `-`. A value follows a space or `=`; one that starts with a dash must follow `=`.
- `${local_rank}` in the script's arguments is replaced for each worker (quote it, or the shell will replace it).
- If a flag is not given, its environment variable is used if it is set and not empty.

`rallyrun --help` lists the same flags; `rallyrun --print-completion bash` (or `zsh`, `tcsh`) prints a completion script.
Bad input prints one line that names the flag and exits with [code 2](failures.md#exit-codes); nothing is started.

"""


DIFFERENCES_MARK = "{differences}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # mkdocs's
    return markdown.replace(DIFFERENCES_MARK, differences_table())


def differences_table() -> str:
    """One row for each name and difference; a difference that several facts show has one row."""
    rows = dict.fromkeys(map(_row, DIFFERENCES))
    return "\n".join(["| name | torch | rallypoint | because |", "|---|---|---|---|", *rows])


def _row(one: Difference) -> str:
    name = f"`{one.module.removeprefix('torch.distributed.')}.{one.name}`"
    return "| " + " | ".join(text.replace("|", "\\|") for text in (name, one.torch, one.ours, one.why)) + " |"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "command-line.md", content=INTRODUCTION + usage.markdown()))
    return files
