"""Print what stands behind each name of the snapshot once ``rallypoint.compat`` is installed, described as the snapshot is.

python -S -m tests.compat.our_surface
"""

from __future__ import annotations

import importlib
import json

from tests.compat.make_surface import SURFACE, describe

from rallypoint import compat


def found(module: str, name: str) -> object:
    try:
        return describe(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError):
        return {"kind": "missing"}


def main() -> None:
    compat.install()
    modules = json.loads(SURFACE.read_text())["modules"]
    print(json.dumps({module: {name: found(module, name) for name in names} for module, names in modules.items()}))


if __name__ == "__main__":
    main()
