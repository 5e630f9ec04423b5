"""Who has sent a signal: the kernel tells its handler, and nobody else.

The interpreter's own handler, which is C, drops it. Python code cannot be called in its place: a handler may run in the middle of
anything, whichever thread the kernel has picked. So a few machine instructions stand before it. They note the sender in a page of
memory and jump to the interpreter's handler, which finds everything as it would without them: no call, no lock, no system call,
nothing to wait for, nothing that can fail. Two signals are two notes, in whichever threads they come. A signal is
blocked for nobody, so there is nothing for a child to inherit, and a new program begins without all of this, as with any handler.

There are such instructions for x86-64 alone, as nothing else was there to try them on. Elsewhere, and where a host forbids memory
with code of its own, senders are not known, and all else is as it is.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable

from rallypoint.base import report
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Notes", "Sender", "describe", "take_notes"]

# In the page: how many notes were taken, then room for so many: the signal, how it was sent, and by which process and user.
_SLOTS, _SLOT_WORDS = 64, 4
_SIZEOF_SIGACTION, _FLAGS_AT = 152, 136  # of the C library's structure, which begins with the handler
_SA_SIGINFO, _SA_RESTORER = 0x4, 0x04000000  # the latter is the library's own to set
_NO_HANDLERS = (0, 1)  # the default, and to ignore it
_MAP_FAILED = (1 << 64) - 1
_MACHINE = "x86_64"
_CODE = (
    "f30f1efa"  # endbr64
    "48b9{page}"  # mov rcx, page
    "b801000000"  # mov eax, 1
    "f00fc101"  # lock xadd [rcx], eax: which note this is, whoever else takes one now
    "83e03f"  # and eax, 63
    "c1e004"  # shl eax, 4
    "488d4c0110"  # lea rcx, [rcx+rax+16]
    "8b4608"  # mov eax, [rsi+8]: how it was sent
    "894104"  # mov [rcx+4], eax
    "488b4610"  # mov rax, [rsi+16]: by which process and user
    "48894108"  # mov [rcx+8], rax
    "8939"  # mov [rcx], edi: which signal; now the note is there
    "48b8{handler}"  # mov rax, handler
    "ffe0"  # jmp rax
)


class Sender(Value):
    """The process is 0 where it is of another namespace than ours; with `is_kernel` there was none."""

    pid: int
    uid: int
    is_kernel: bool

    @property
    def is_another(self) -> bool:
        """Whether it is somebody else of whom we know more than the signal."""
        return not self.is_kernel and self.pid != os.getpid()

    @property
    def origin(self) -> str:
        """The end of a sentence on what it has sent; what it is called takes longer to find out, see `describe`."""
        return f" from process {self.pid}" if self.is_another and self.pid else ""


class Notes:
    """What the instructions before the handler at an address have noted. They stay for as long as the process does: somebody may
    have read a signal's handler meanwhile, and put it back later.
    """

    def __init__(self, library: _Library, handler: int) -> None:
        self.handler = handler
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._words = memoryview(self._page).cast("i")
        self._read = 0  # of all notes
        self._untaken: list[tuple[int, Sender]] = []
        page, back = (address.to_bytes(8, "little").hex() for address in (library.address_of(self._page), handler))
        self.entry = library.map_code(bytes.fromhex(_CODE.format(page=page, handler=back)))

    def forget(self) -> None:
        """Nobody wants to know of what was noted until now."""
        self._take_in()
        self._untaken.clear()

    def take(self, number: int) -> Sender | None:
        """Who has sent the oldest of these signals, of those that were not taken yet."""
        self._take_in()
        for at, (noted, sender) in enumerate(self._untaken):
            if noted == number:
                del self._untaken[at]
                return sender
        return None

    def _take_in(self) -> None:
        """All that is there, up to one that is just being written."""
        self._read = max(self._read, self._words[0] - _SLOTS)
        while self._read < self._words[0]:
            at = _SLOT_WORDS * (1 + self._read % _SLOTS)
            number, code, pid, uid = self._words[at : at + _SLOT_WORDS]
            if not number:
                return
            self._words[at] = 0
            self._read += 1
            self._untaken.append((number, Sender(pid, uid & 0xFFFFFFFF, code > 0)))


class _Library:
    """What this takes of the C library, as ctypes would (see `processes.kernel`). AttributeError: the library lacks it."""

    def __init__(self) -> None:
        import _ctypes

        simple: Any = _ctypes._SimpleCData
        byte: Any = type("Byte", (simple,), {"_type_": "c"})
        self._pointer: Any = type("Pointer", (simple,), {"_type_": "P"})
        about = {"_flags_": _ctypes.FUNCFLAG_CDECL, "_restype_": self._pointer}
        function: Any = type("Function", (_ctypes.CFuncPtr,), about)
        library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        self._mmap, self._sigaction = (function(_ctypes.dlsym(library, name)) for name in ("mmap", "sigaction"))
        self._addressof: Any = _ctypes.addressof
        self._action, self._whole_page = byte * _SIZEOF_SIGACTION, byte * mmap.PAGESIZE
        self._kept: list[Any] = []

    def address_of(self, page: mmap.mmap) -> int:
        self._kept.append(self._whole_page.from_buffer(page))
        return int(self._addressof(self._kept[-1]))

    def map_code(self, code: bytes) -> int:
        """Its address; there it can be executed, and not be written. OSError: this host allows only code that is in files."""
        fd = os.memfd_create("rallypoint-senders", os.MFD_CLOEXEC)
        try:
            os.write(fd, code)
            os.truncate(fd, mmap.PAGESIZE)
            nowhere, size = self._pointer(0), self._pointer(mmap.PAGESIZE)
            address = self._mmap(nowhere, size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, nowhere)
        finally:
            os.close(fd)
        if address is None or address == _MAP_FAILED:
            raise OSError("code cannot be mapped")
        return int(address)

    def action_of(self, number: int) -> bytearray:
        found = bytearray(_SIZEOF_SIGACTION)
        view = self._action.from_buffer(found)
        if self._sigaction(number, None, view):
            raise OSError(f"what is done at signal {number} cannot be read")
        del view
        return found

    def set_action(self, number: int, action: bytes) -> None:
        if self._sigaction(number, action, None):
            raise OSError(f"what is done at signal {number} cannot be changed")


_library: _Library | None = None
_notes: Notes | None = None


def take_notes(numbers: Iterable[int]) -> Notes | None:
    """Have the senders of these signals noted, whose handlers are the interpreter's; None where that cannot be had."""
    if os.uname().machine != _MACHINE or sys.maxsize < 1 << 32:
        return None
    try:
        return _take_notes(numbers)
    except (ImportError, AttributeError, OSError) as error:
        report.debug(f"who sends a signal is not known here: {error}")
        return None


def _take_notes(numbers: Iterable[int]) -> Notes | None:
    global _library, _notes
    _library = _library or _Library()
    for number in numbers:
        action = _library.action_of(number)
        handler, flags = int.from_bytes(action[:8], "little"), int.from_bytes(action[_FLAGS_AT : _FLAGS_AT + 4], "little")
        if handler in _NO_HANDLERS or flags & _SA_SIGINFO:
            continue
        _notes = _notes or Notes(_library, handler)
        if _notes.handler != handler:
            continue
        action[:8] = _notes.entry.to_bytes(8, "little")
        action[_FLAGS_AT : _FLAGS_AT + 4] = ((flags & ~_SA_RESTORER) | _SA_SIGINFO).to_bytes(4, "little")
        _library.set_action(number, bytes(action))
    if _notes is not None:
        _notes.forget()
    return _notes


def describe(name: str, sender: Sender | None) -> str:
    """Who has sent the signal of this name, in a sentence; empty where nobody else has, or nothing is known.

    It reads /proc, so it is for afterwards. A user has a number here: to ask for the name may take a name server.
    """
    if sender is None or not sender.is_another:
        return ""
    if not sender.pid:
        return f"{name} came from outside of this container, whose processes have no number here"
    try:
        with open(f"/proc/{sender.pid}/comm", encoding="utf-8", errors="replace") as file:
            who = file.read().strip()
    except OSError:
        who = "which has ended since then"
    whose = "" if sender.uid == os.getuid() else ", of root" if sender.uid == 0 else f", of user {sender.uid}"
    return f"{name} came from process {sender.pid} ({who}{whose})"
