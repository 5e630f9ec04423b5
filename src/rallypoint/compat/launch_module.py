"""What ``torch.distributed.launch`` offers: the launcher before torchrun, whose scripts take ``--local-rank`` as an argument.

It is deprecated there, and says so here too. With ``--use-env`` it is torchrun.
"""

from __future__ import annotations

from rallypoint.errors import UsageError
from rallypoint.torch_run import get_args_parser, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

__all__ = ["get_args_parser", "launch", "main", "parse_args", "run"]

_DEPRECATED = (
    "The module torch.distributed.launch is deprecated: use rallyrun or torchrun. They pass no --local-rank to a script, as this"
    " module does without --use-env; let it read os.environ['LOCAL_RANK']."
)


def parse_args(args: Sequence[str] | None) -> Namespace:
    """The command line as torchrun's parser reads it, with ``--use-env``; None takes that of this process."""
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        default=False,
        action="store_true",
        help="Workers find their local rank in the environment only, and not as the argument --local-rank.",
    )
    return parser.parse_args(args)


def launch(args: Any) -> None:
    """Run the job that `args` describe; a program that is not Python gets no ``--local-rank`` that it did not ask for."""
    if args.no_python and not args.use_env:
        raise UsageError("--no-python needs --use-env: a program that is not Python is given no --local-rank argument")
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line; None takes that of this process."""
    import warnings

    warnings.warn(_DEPRECATED, category=FutureWarning, stacklevel=2)
    launch(parse_args(args))
