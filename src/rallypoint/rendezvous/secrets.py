"""The secret of a job that was given none: what the store's host makes for it, and how the others come by it.

`Keyring` is both sides. The host draws a secret, and offers it in boxes (`coordination.embedded.handshake`):

- ``munge``: sealed for processes of the same user, on all machines that share a munge (`rendezvous.munge`);
- ``home``: a file of this user's, which only that user can read, has a key; the secret follows from it and a number that the box
  names. The file stays, for all jobs. Its name says nothing of the key's value, but a box says which key it takes, so that who
  finds another one in a home of its own knows that it has the wrong one.

Nobody can tell beforehand whether all nodes of a job have a munge, or the home, in common. A node that has not must not be kept
from a job in which it could take part without all of this. But who is let in because it says that it can open nothing may be
anybody. So:

- *In a job of Slurm whose host has munge*, whoever cannot open the box is refused: Slurm itself needs it on each of its nodes.
- *Else* the kernel is asked about who connects from the host's own machine, and only the same user is let in. Who comes from
  another machine and can open nothing is let in, and the host says so, once.

The one who must not be fooled is whoever has been in: a node that has opened a box of its job talks to no store without.

File servers and munge's daemon may hang, so each is given a few seconds, and then it is as if it were not there.
"""

from __future__ import annotations

import hmac
import os
from contextlib import suppress

from rallypoint.base import defaults, environment, report
from rallypoint.base.outbox import Deputy
from rallypoint.base.own_files import FOREIGN, foreign_owner, open_folder, replace_own, write_whole
from rallypoint.base.records import Value
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from rallypoint.coordination.embedded.tls import Tls
    from rallypoint.rendezvous.settings import Settings

__all__ = ["Keyring", "Offer", "secret_of", "tls_of"]

MUNGE, HOME = "munge", "home"
FILE_S = 3.0  # a file server that hangs
KEY_BYTES = 32
NAME_BYTES = 8
SALT_BYTES = 16
FOLDER_MODE = 0o700
OF_OTHERS = 0o077


def secret_of(settings: Settings) -> bytes | Keyring | None:
    """What was given, or is mounted where it is looked for; or who may find one; or None. UsageError: it is no secret."""
    from rallypoint.rendezvous.settings import is_secret_looked_for, load_secret

    secret = load_secret(settings, environment.own)
    if secret is None and settings.tls_cert is not None:
        return None  # whoever has no certificate does not get so far
    if secret is not None or not is_secret_looked_for(settings, environment.own):
        return secret
    if os.access(defaults.MOUNTED_SECRET, os.R_OK):
        return load_secret(settings.replace(secret_file=defaults.MOUNTED_SECRET), {})
    return Keyring()


def tls_of(settings: Settings) -> Tls | None:
    """What the certificates are for that were given. UsageError: one is missing, or will not do."""
    files = {key: getattr(settings, key) for key in ("tls_cert", "tls_key", "tls_ca")}
    given = [key for key, path in files.items() if path is not None]
    if not given:
        return None
    if missing := [key for key in files if key not in given]:
        raise UsageError(
            f"{given[0]} ({settings.source(given[0])}) is given, and {' and '.join(missing)} is not; TLS needs all three"
        )
    from rallypoint.coordination.embedded.tls import Tls

    for key, path in files.items():
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{key} ({settings.source(key)}): {path} cannot be read: {error.strerror}") from error
    try:
        return Tls(*files.values())
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise UsageError(f"tls_cert, tls_key and tls_ca ({', '.join(files.values())}) do not do for TLS: {error}") from error


class Offer(Value):
    """What the host offers: the secret, the boxes with it, and whether who can open none is refused."""

    secret: bytes
    boxes: Mapping[str, str]
    is_strict: bool

    def __str__(self) -> str:
        others = "nobody else can join" if self.is_strict else "a node elsewhere that does not is let in without (see --secret)"
        return f"agents of the same user find its secret, and {others}"


class Keyring:
    """What one node can open. Nothing is looked for before it is asked."""

    def __init__(self) -> None:
        self.has_opened = False
        self._seen: tuple[Mapping[str, str], bytes] | None = None  # a connection that is made anew needs no munge
        self._clerk = Deputy()
        self._has_told = False
        self._has_warned = False

    # --- the host's side ---------------------------------------------------------------------------------------------------

    def offer(self) -> Offer | None:
        """A new secret, and what nodes find it in; None if there is nothing that could keep it from others."""
        secret, boxes = os.urandom(KEY_BYTES), dict[str, str]()
        with suppress(OSError):
            key = self._clerk.do(_own_key, FILE_S)
            salt = os.urandom(SALT_BYTES)
            secret, boxes[HOME] = _from_key(key, salt), f"{_name_of(key)} {salt.hex()}"
        with suppress(OSError):
            from rallypoint.rendezvous.munge import seal

            boxes = {MUNGE: seal(secret), **boxes}
        if not boxes:
            return None
        self._note(boxes, secret)
        report.debug(f"the job's secret is offered by {' and '.join(boxes)}")
        return Offer(secret, boxes, MUNGE in boxes and bool(environment.text(defaults.ENV_SCHEDULERS["slurm"])))

    def judge(self, sock: socket.socket) -> str:
        """Why a peer that can open nothing is refused; nothing where it is not. Called by the store's thread."""
        from rallypoint.net.peers import stranger_from_here

        if who := stranger_from_here(sock):
            return f"this store is for one user, and it was {who} who came without the secret"
        if not self._has_warned and _is_from_elsewhere(sock):
            self._has_warned = True
            report.warn(
                f"{sock.getpeername()[0]} cannot find the job's secret, and is let in without, as is everyone who can reach the"
                " store from another machine; the same --secret FILE on all nodes keeps others out, and with --secret none there"
                " is no secret"
            )
        return ""

    # --- a node's side -----------------------------------------------------------------------------------------------------

    def open(self, boxes: Mapping[str, str]) -> bytes | None:
        """The secret that is in one of them."""
        if self._seen is not None and self._seen[0] == boxes:
            return self._seen[1]
        troubles = []
        openers: dict[str, Callable[[str], bytes]] = {HOME: self._open_home, MUNGE: _open_munge}
        for kind, opener in openers.items():
            if kind in boxes:
                try:
                    secret = opener(boxes[kind])
                except OSError as trouble:
                    troubles.append(f"{kind}: {trouble.strerror or trouble}")
                else:
                    self._note(boxes, secret)
                    return secret
        if not self._has_told:
            self._has_told = True
            why = "; ".join(troubles) or f"{', '.join(boxes)}: not known here"
            report.info(f"this node cannot find the job's secret where its store says that it is ({why})")
        return None

    def _open_home(self, box: str) -> bytes:
        key = self._clerk.do(_read_key, FILE_S)
        name, _, salt = box.partition(" ")
        if name != _name_of(key):
            raise OSError(0, f"{_key_path()} here is another than there")
        try:
            return _from_key(key, bytes.fromhex(salt))
        except ValueError:
            raise OSError(0, "it makes no sense") from None

    def _note(self, boxes: Mapping[str, str], secret: bytes) -> None:
        self._seen, self.has_opened = (boxes, secret), True


def _is_from_elsewhere(sock: socket.socket) -> bool:
    from rallypoint.net.peers import user_of

    try:
        return user_of(sock) is None
    except (OSError, NotImplementedError):
        return False


def _open_munge(box: str) -> bytes:
    from rallypoint.rendezvous.munge import unseal

    return unseal(box)


# --- the key in the home ---------------------------------------------------------------------------------------------------


_NAMES = ("rallypoint", "secret")


def _key_path() -> str:
    return os.path.join(environment.state_dir(), *_NAMES)


def _own_key() -> bytes:
    """The user's key, which is made if there is none; whoever else makes one at the same time gets the same."""
    with suppress(FileNotFoundError):
        return _read_key()
    folder = os.path.dirname(_key_path())
    _check_ours(folder)
    os.makedirs(folder, FOLDER_MODE, exist_ok=True)
    within, new = open_folder(folder), f"{_NAMES[-1]}.{os.urandom(4).hex()}"
    try:
        replace_own(new, lambda fd: write_whole(fd, os.urandom(KEY_BYTES).hex().encode() + b"\n"), within)
        try:
            with suppress(FileExistsError):
                os.link(new, _NAMES[-1], src_dir_fd=within, dst_dir_fd=within)
        finally:
            os.unlink(new, dir_fd=within)
    finally:
        os.close(within)
    return _read_key()


def _check_ours(folder: str) -> None:
    """PermissionError: what is to be made would lie in a folder of another user's, who could make root write elsewhere."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if owner := foreign_owner(os.stat(folder or os.curdir)):
        raise PermissionError(0, FOREIGN.format(owner=owner))


def _read_key() -> bytes:
    if not environment.state_dir():
        raise PermissionError(0, "there is no home")
    path = _key_path()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & OF_OTHERS:
            raise PermissionError(0, f"{path} belongs to another user, or others can read it; delete it, or chmod 600 it")
        key = os.read(fd, 4 * KEY_BYTES).strip()
    finally:
        os.close(fd)
    if len(key) < KEY_BYTES:
        raise OSError(0, f"{path} has {len(key)} bytes, too few for a key; delete it")
    return key


def _name_of(key: bytes) -> str:
    return hmac.digest(key, b"name of the key", "sha256")[:NAME_BYTES].hex()


def _from_key(key: bytes, salt: bytes) -> bytes:
    return hmac.digest(key, b"secret of a job" + salt, "sha256")
