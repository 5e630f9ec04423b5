"""The page of flags is made from the table that the parser reads, whenever the documentation is built: it cannot go stale."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rallypoint import usage

INTRODUCTION = """\
# Command line

    rallyrun [flags] script [arguments of the script]
    rallyrun [flags] -m module [arguments of the module]
    rallyrun [flags] --no-python program [arguments of the program]

`rallypoint run …` and `python -m rallypoint run …` are the same command. These rules hold for all flags:

- Flags stand before the script. **Everything after the script's name is the script's**, whatever it looks like.
- Flags are never abbreviated, so a flag meant for the script is never mistaken for one of ours.
- `_` may be written for `-`; a value follows after a space or `=`, and one that begins with a dash must follow `=`.
- `${local_rank}` in the script's arguments is replaced for each worker (quote it, or the shell replaces it).
- A flag that is not given is taken from its environment variable, where that is set and not empty.

`rallyrun --help` shows the same flags, and `rallyrun --print-completion bash` (or `zsh`, `tcsh`) a completion script for them.
Bad input ends with one line that names the flag, and [exit code 2](failures.md#exit-codes); nothing is started then.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "command-line.md", content=INTRODUCTION + usage.markdown()))
    return files
