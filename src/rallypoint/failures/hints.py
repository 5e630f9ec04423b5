"""What is behind an exception that has nothing to do with the line that raised it: a full disk, a broken pipe, a lost mount.

Such an exception looks like a fault of the program, and its traceback leads to whatever happened to write or read just then. So
it is told what it is, and what to look at, by its number or by its words; nothing is said where there may be another reason.
"""

from __future__ import annotations

__all__ = ["hint_for"]

_ERRNO = "[Errno "  # as Python begins the words of an OSError
_BY_NUMBER = {
    5: "the disk, or the file server behind it, failed to read or write (EIO); see `dmesg -T` on that host, and the mount",
    12: "the host, or the job's cgroup, has no memory left (ENOMEM): let the program use less, or give the job more",
    23: "the host has no open files left (ENFILE): see `sysctl fs.file-nr`",
    24: "the process has no open files left (EMFILE): see `ulimit -n`; data loaders that share tensors by files use many",
    28: "the disk is full, or out of inodes (ENOSPC): see `df -h` and `df -i` there",
    30: "the file system is read-only (EROFS): it was mounted so, or the kernel made it so after an error of the disk",
    32: "it wrote to a pipe or socket that the other side had closed (EPIPE): look at why that one ended first",
    105: "the network card or the kernel had no buffers left (ENOBUFS)",
    107: "the mount is gone (ENOTCONN): the program that serves it, such as a client of object storage, has ended on that host",
    112: "the other host is down (EHOSTDOWN)",
    116: "the mount is stale (ESTALE): the file server, or what it exported, was replaced; mount it anew on that host",
    121: "the device failed to read or write (EREMOTEIO); see `dmesg -T` on that host",
    122: "the disk quota is used up (EDQUOT): see `quota -s`",
}
_BY_TYPE = {
    "MemoryError": "Python found no memory: let the program use less, or give the job more",
    "BrokenPipeError": _BY_NUMBER[32],
}
_OF_FILES = (5, 107)  # of a socket or a terminal they mean something else
# Libraries wrap these in exceptions of their own.
_BY_WORDS = (
    ("no space left on device", _BY_NUMBER[28]),
    ("disk quota exceeded", _BY_NUMBER[122]),
    ("stale file handle", _BY_NUMBER[116]),
    ("too many open files", _BY_NUMBER[24]),
    ("read-only file system", _BY_NUMBER[30]),
    (
        "out of memory. tried to allocate",
        "the GPU has no memory left: smaller batches, or see who else uses it with `nvidia-smi`",
    ),
    ("unable to open shared memory object", "shared memory could not be had: see `df -h /dev/shm`"),
    (
        "dataloader worker (pid",
        "a data loader's process ended: its own last words, or `dmesg -T`, say why; often /dev/shm is full",
    ),
)
_PATH_CHARS_MAX = 200


def hint_for(exception: str) -> str:
    """One sentence for an exception in a line as Python prints it, ``Type: message``; empty where there is nothing to say."""
    kind, _, message = exception.partition(": ")
    path, number = _path(message), _number(message) if message.startswith(_ERRNO) else 0
    found = _BY_NUMBER.get(number) if path or number not in _OF_FILES else None
    found = found or _BY_TYPE.get(kind.rpartition(".")[2]) or _by_words(message)
    if not found:
        return ""
    return f"{found}; it was {path}" if path else found


def _number(message: str) -> int:
    text = message.removeprefix(_ERRNO).partition("]")[0]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0


def _by_words(message: str) -> str:
    words = message.lower()
    return next((hint for wording, hint in _BY_WORDS if wording in words), "")


def _path(message: str) -> str:
    """That of the file, which ends the words of an OSError: ``[Errno 28] No space left on device: '/data/x'``."""
    _, found, rest = message.partition(": '")
    path = rest.partition("'")[0]
    return path if found and message.startswith(_ERRNO) and path and len(path) <= _PATH_CHARS_MAX else ""
