"""One cell of bytes with a version, such as torch's rendezvous back ends are, and how a job's document in it is changed.

A back end is any object with ``get_state() -> (state, token) | None`` and ``set_state(state, token) -> (state, token, has_set) |
None``, which writes only if the token is that of what is there.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from rallypoint.base.records import Value
from rallypoint.coordination.cell.document import CellDocument, DocumentTooLarge, NotOurDocument, decode, encode
from rallypoint.coordination.engine import RefusedError, StoreGoneError, UnreachableError
from rallypoint.errors import RendezvousStateError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Backend(Protocol):
        def get_state(self) -> tuple[bytes, Any] | None: ...
        def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None: ...


__all__ = ["Cell", "Change"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.2
CONNECTION_ERROR = "RendezvousConnectionError"  # ours or torch's


class Change(Value):
    """The document after it, and when it was sent to be written; None if there was nothing to write."""

    document: CellDocument
    written_at: float | None


class Cell:
    """A job's document in `backend`. Used by one thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._identity = ""
        self._name = os.urandom(6).hex()
        self._writes = 0

    def change(self, alter: Callable[[CellDocument], bool], until: float) -> Change:
        """Let `alter` change the document, anew if others have written meanwhile, until what it made is written.

        It says whether there is anything to write. UnreachableError: not done until then, or it is not known.
        """
        found, pause_s = self._get(), FIRST_PAUSE_S
        while True:
            document = self._document(found)
            if not alter(document):
                return Change(document, None)
            sent_at = time.monotonic()
            if sent_at >= until:  # who asked for it has given up, and may have acted on that
                raise UnreachableError("the back end was too slow, or others too quick, for a change to be made in time")
            found = self._set(document, None if found is None else found[1])
            if found is None:
                return Change(document, sent_at)
            time.sleep(random.uniform(0, pause_s))  # so that those who collide do not do so again
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _document(self, found: tuple[bytes, Any] | None) -> CellDocument:
        if found is None:
            if self._identity:
                raise StoreGoneError("the back end has lost the state of this job; the job ends here")
            return CellDocument(os.urandom(8).hex())
        document = self._decoded(found[0])
        if self._identity and document.identity != self._identity:
            raise StoreGoneError("the back end holds the state of another run of this job; the job ends here")
        self._identity = document.identity
        return document

    def _decoded(self, state: bytes) -> CellDocument:
        try:
            return decode(bytes(state))
        except (NotOurDocument, TypeError) as error:
            raise RendezvousStateError(
                f"the rendezvous state in the back end is not rallypoint's: {error}; nodes of another launcher, or of another"
                " version, use the same run id, or something else has written there"
            ) from error

    # --- the back end ------------------------------------------------------------------------------------------------------

    def _get(self) -> tuple[bytes, Any] | None:
        found = self._call(self._backend.get_state)
        return None if found is None else (found[0], found[1])

    def _set(self, document: CellDocument, token: Any) -> tuple[bytes, Any] | None:
        """Write it; if others have written first, what is there now."""
        self._writes += 1
        try:
            state = encode(document, f"{self._name}.{self._writes}")
        except DocumentTooLarge as error:
            raise RefusedError(str(error)) from error
        answer = self._call(lambda: self._backend.set_state(state, token))
        if answer is not None and answer[2]:
            self._identity = document.identity
            return None
        there = self._get() if answer is None else (answer[0], answer[1])
        # A back end may have asked twice by itself, and tell of the second time only.
        return None if there is not None and bytes(there[0]) == state else there

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except OSError as error:
            raise UnreachableError(f"the back end cannot be reached: {error}") from error
        except Exception as error:  # a back end may raise what it likes; only this one is known to pass by itself
            if any(base.__name__ == CONNECTION_ERROR for base in type(error).__mro__):
                raise UnreachableError(str(error)) from error
            raise
