"""What the scheduler that started this process says of its job, so that nobody has to say it again.

One pure function for each scheduler, from the environment (and files that it names) to a `Found`.
"""

from __future__ import annotations

__all__: list[str] = []
