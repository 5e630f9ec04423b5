"""How workers tell the test what they found, and how the test tells them that it has seen enough."""

import json
import os
import time

WORDS = ("RANK", "WORLD", "MASTER", "ROLE", "TORCHELASTIC")


def tell(**found: object) -> None:
    """One whole line, which no other worker's can break into."""
    env = {name: value for name, value in os.environ.items() if any(word in name for word in WORDS)}
    told = {"pid": os.getpid(), "at": time.monotonic(), "env": env, **found}
    os.write(1, f"TOLD {json.dumps(told)}\n".encode())


def is_over(folder: str) -> bool:
    return os.path.exists(f"{folder}/finish")
