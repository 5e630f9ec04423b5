"""What only processes of this user can open, on any machine where the same munge tells who a process is.

munge's own two commands do it, once for each agent, in some milliseconds. *Rejected:* its library through ctypes (a C library in
the agent, whose calls cannot be given up when its daemon hangs); the daemon's socket (its protocol is nobody's promise).

A credential may be opened again, and when it is old: munge then says so, and what is in it all the same, as it was checked. That
is all that is wanted here: the store gives the same one to all nodes, whose clocks may differ, and what proves anything is the
handshake that follows.
"""

from __future__ import annotations

import os

__all__ = ["seal", "unseal"]

TIMEOUT_S = 3.0  # a daemon that hangs
MOST_CHARACTERS = 600  # a greeting is a small frame
CHECKED = (b"0", b"15", b"16", b"17")  # good; expired, rewound (by another's clock), replayed
LONGEST_LIFE = "-1"


def seal(content: bytes) -> str:
    """OSError: munge cannot do it here, or what it gives could not be opened again."""
    user = str(os.geteuid())
    credential = _run(["munge", "--restrict-uid", user, "--ttl", LONGEST_LIFE], content.hex().encode()).strip().decode("ascii")
    if len(credential) > MOST_CHARACTERS or unseal(credential) != content:
        raise OSError(0, "munge does not open what it has sealed")
    return credential


def unseal(credential: str) -> bytes:
    """What a process of this user has sealed; OSError: it cannot be opened here, or another user has made it."""
    said = _run(["unmunge", "--numeric", "--keys", "STATUS,UID"], credential.encode())
    head, _, content = said.partition(b"\n\n")
    status, user = (line.rpartition(b" ")[2] for line in (head + b"\n ").split(b"\n")[:2])
    if status not in CHECKED:
        raise OSError(0, "unmunge says nothing of it")
    if user != str(os.geteuid()).encode():
        raise OSError(0, f"it was made by user {user.decode('ascii', 'replace')}")
    try:
        return bytes.fromhex(content.decode("ascii"))
    except ValueError:
        raise OSError(0, "unmunge gives something else") from None


def _run(command: list[str], said: bytes) -> bytes:
    """What it prints. Its exit code is not looked at: a credential that is old is not in order for unmunge."""
    import subprocess

    try:
        done = subprocess.run(command, input=said, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(0, f"{command[0]} does not answer within {TIMEOUT_S:g} s") from None
    if not done.stdout:
        first = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise OSError(0, first or f"{command[0]} ended with code {done.returncode}")
    return done.stdout
