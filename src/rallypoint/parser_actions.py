"""Two argparse actions whose defaults come from the environment, as the parser of torchrun has them.

A flag ``--max-restarts`` whose attribute is ``max_restarts`` takes its default from ``PET_MAX_RESTARTS``; what stands on the
command line wins. The names are part of the contract with programs that add such flags of their own.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace

from rallypoint.base import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["check_env", "env"]


class env(Action):
    """A flag with a value: ``parser.add_argument("--role", action=env, default="x")`` reads ``PET_ROLE``.

    A flag that has a default, from here or from there, is no longer required.
    """

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        found = environment.own.get(_variable(dest), default)
        super().__init__(dest=dest, default=found, required=required and not found, **kwargs)

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class check_env(Action):
    """A flag without a value: ``parser.add_argument("--verbose", action=check_env)`` is set where ``PET_VERBOSE`` is 1."""

    def __init__(self, dest: str, default: bool = False, **kwargs: Any) -> None:
        text = environment.own.get(_variable(dest))
        is_set = bool(default) if text is None else int(text) != 0
        super().__init__(dest=dest, const=True, default=is_set, nargs=0, **kwargs)

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.const)


def _variable(dest: str) -> str:
    return f"PET_{dest.upper()}"
