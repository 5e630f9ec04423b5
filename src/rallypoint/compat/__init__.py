"""rallypoint behind torch's names, for programs that are written against torch's elastic API.

    import rallypoint.compat

    rallypoint.compat.install()

From then on ``torch.distributed.elastic`` with all of its public modules, ``torch.distributed.launcher``,
``torch.distributed.run`` and ``torch.distributed.launch`` are rallypoint's, also for ``mock.patch`` by those names. Names that
were imported before stay torch's. Torch itself is not imported; where it is not even installed, ``torch`` and
``torch.distributed`` have nothing else, and ``importlib.util.find_spec("torch")`` gives None as before.
"""

from __future__ import annotations

import sys

from rallypoint.compat.installation import Installation, is_asked_for

__all__ = ["install", "is_installed", "uninstall"]

_installed: Installation | None = None


def install(children: bool | None = None) -> None:
    """Put rallypoint behind torch's names, in this process and, with `children`, in those that it will start.

    Where `children` is not given, the environment decides: ``RALLYPOINT_COMPAT=1`` means yes.
    """
    global _installed
    if _installed is None:
        _installed = Installation(sys.modules)
    if is_asked_for() if children is None else children:
        _installed.extend_to_children()


def uninstall() -> None:
    """Give torch's names back to torch. Names that were imported in the meantime stay rallypoint's."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def is_installed() -> bool:
    """Whether torch's names stand for rallypoint now."""
    return _installed is not None
