"""Hurting a running job on purpose, for its users' own drills: ``rallypoint chaos``.

What is pure: the words for faults (`faults`), files of them (`schedule`), what can be done to a job as it is now (`scene`),
which fault is next (`plan`), and what came of each (`outcome`). What acts: the agents of the job and their processes, each
held by a file descriptor (`grip`), whatever has to be undone (`guardian`, a process of its own; `holds`), and the drill
itself (`drill`).
"""

from __future__ import annotations

__all__: list[str] = []
