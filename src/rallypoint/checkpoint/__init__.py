"""State that outlives the worker: snapshots in memory that the agent owns, for the worker that comes after.

`layout` says how a snapshot lies in memory and which one counts, `trees` takes a state apart into what is pickled and what is
copied, `slots` writes and reads, `client` is what a program calls, and `vault` is the agent's side.

Between nodes: `moves` says which snapshots go where, `transfer` is a connection over which they go, `depot` serves them and takes
copies, `courier` fetches and copies, and `line` is between it and a worker.
"""

from __future__ import annotations

__all__: list[str] = []
