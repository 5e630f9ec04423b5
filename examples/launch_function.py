"""The Python API: run a function in four processes and collect what it returns, by rank.

``python examples/launch_function.py``
"""

from __future__ import annotations

import os

import rallypoint


def square(offset: int) -> int:
    return (int(os.environ["RANK"]) + offset) ** 2


if __name__ == "__main__":
    results = rallypoint.launch(square, nproc=4, args=(10,))
    print(f"squares by rank: {results}")
