"""How a node and its store find out, before anything else, that they belong together.

Without a secret the node's greeting names its job, and the store answers with its welcome. With a secret each proves to the other
that it knows the secret and the job's name, without telling either:

    node  → hello      version, a nonce, that it has a secret
    store → challenge  version, a nonce, that it has a secret
    node  → proof      HMAC over both nonces and the job's name, in the role of the node
    store → welcome    in the first sealed frame, which only who knows the secret can make

The keys that seal all later frames are made from the secret, the job's name and both nonces, so they are new for each connection.
Whoever listens can try out secrets on what he has seen: a secret is to be drawn at random, not thought up.

A node that was given no secret may be able to find it: then it says so, and gets from the store, with the challenge, *boxes* that
hold the secret, each of which only some can open, such as the same user's processes where munge says who those are:

    node  → hello      as without a secret, and that it opens boxes
    store → challenge  version, a nonce, the boxes
    node  → proof      as above; or that it could open none of them

A box is no proof: it may be old, or copied from elsewhere. What counts is the proof that follows, over fresh nonces. To one who
can open none, the store may still listen as if there were no secret, or refuse it: that is for whoever made the boxes to say. A
node that has opened a box of its job once wants no store without, so that nobody can talk it out of that.

The warden of an agent that is dead greets in another way, to *testify* that every process of its node is gone, and is not let in:

    warden → hello      version, the number of its node's lease, a nonce
    store  → challenge  version, a nonce
    warden → proof      HMAC over both nonces and the lease, with a key that the agent left it: of the secret, the job's name and
                        the token of that lease's session, which it cannot be made without
    store  → heard      true; false if there is no such lease any more

Who knows an endpoint and not its job *asks* for the job's name, and is not let in. Without a secret it is told. With one:

    asker → hello      version, a nonce, that it has a secret, and its question
    store → challenge  version, a nonce
    asker → proof      HMAC over both nonces with the secret
    store → name       and an HMAC over both nonces and the name

A refusal is a sentence. To a peer that has not proven itself it tells nothing that the peer does not know already, except,
where there is no secret, the name of the job.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os

from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.coordination.embedded.wire import FrameError, Seal, open_seal
from rallypoint.coordination.engine import Testimony
from rallypoint.coordination.testimony import AGENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    class Opener(Protocol):
        """Finds the secret in what a store offers, as long as there is something that it can open."""

        @property
        def has_opened(self) -> bool: ...

        def open(self, boxes: Mapping[str, str]) -> bytes | None: ...

    Secret = bytes | Opener | None

__all__ = [
    "PROTOCOL_VERSION", "Boxes", "ClientHandshake", "HandshakeRefused", "Keys", "NameQuestion", "Owner", "ServerHandshake",
    "Welcome", "make_testimony",
]  # fmt: skip

PROTOCOL_VERSION = 2
MAGIC = "rallypoint store"
NONCE_BYTES = 16
PROOF_BYTES = 32
LARGEST_LEASE = 2**63
UNABLE = b'{"unable":true}'
LONGEST_NAME = 500  # of the job's name, as JSON: the greeting has to fit into a small frame
SHOWN_NAME = 40
TOLD_CHARACTERS = 500  # of a peer's refusal


class HandshakeRefused(Exception):
    """One side will not talk to the other; the text says why, in a sentence that may be told to the other."""


class Keys(Value):
    """What both sides make, each for itself, from the secret."""

    proof: bytes
    from_client: bytes
    from_server: bytes


class Boxes(Value):
    """What a store offers to nodes that were given no secret: boxes by kind, and who is listened to that can open none.

    `judge` gets the connection and says why not, if that is so; without one nobody is.
    """

    by_kind: Mapping[str, str]
    judge: Callable[[], str] | None = None


class Welcome(Value):
    incarnation: str
    session: str


def testimony_key(secret: bytes | None, run_id: str, token: str) -> bytes:
    """What only the owner of a session and its store can make; who has it can testify for that session, and do nothing else."""
    name = run_id.encode("utf-8", "surrogatepass")
    context = [b"key of testimony", bytes([PROTOCOL_VERSION]), len(name).to_bytes(4, "big"), name, token.encode("ascii")]
    return hmac.digest(secret or b"", b"".join(context), "sha256")


def testimony_context(lease: int, nonce: bytes) -> bytes:
    return b"testimony" + lease.to_bytes(8, "big") + nonce


def make_testimony(
    addresses: tuple[tuple[int, Any], ...], secret: bytes | None, run_id: str, token: str, lease: int
) -> Testimony:
    """Each address is a family and what connect() takes. A warden's proof is the HMAC over the context and the store's nonce."""
    nonce = os.urandom(NONCE_BYTES)
    hello = _encode({"magic": MAGIC, "version": PROTOCOL_VERSION, "testimony": lease, "nonce": nonce.hex()})
    return Testimony(AGENT, addresses, (hello, testimony_key(secret, run_id, token), testimony_context(lease, nonce)))


def derive_keys(secret: bytes, run_id: str, client_nonce: bytes, server_nonce: bytes) -> Keys:
    name = run_id.encode("utf-8", "surrogatepass")
    context = [MAGIC.encode(), bytes([PROTOCOL_VERSION]), len(name).to_bytes(4, "big"), name, client_nonce, server_nonce]
    root = hmac.digest(secret, b"".join(context), "sha256")
    return Keys(*(hmac.digest(root, label, "sha256") for label in (b"proof of client", b"frames of client", b"frames of server")))


def name_proof(secret: bytes, asker_nonce: bytes, store_nonce: bytes, run_id: str | None = None) -> bytes:
    """That one knows the secret, who asks for the job's name; or who tells it."""
    role = [b"question for the job"] if run_id is None else [b"name of the job", run_id.encode("utf-8", "surrogatepass")]
    return hmac.digest(secret, b"\0".join([bytes([PROTOCOL_VERSION]), asker_nonce, store_nonce, *role]), "sha256")


def short_name(run_id: str) -> str:
    """The job's name as it is told; the rest of one that is very long is told by its hash."""
    if len(json.dumps(run_id)) <= LONGEST_NAME:
        return run_id
    return f"{run_id[:SHOWN_NAME]}…{hashlib.sha256(run_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = from_json(body)
    except ValueError:
        raise FrameError("this is no greeting of rallypoint's") from None
    if type(message) is not dict:
        raise FrameError("this is no greeting of rallypoint's")
    return message


def _field(message: dict[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if type(value) is not kind:
        raise FrameError(f"the greeting has no proper {name!r}")
    return value


def _nonce(message: dict[str, Any], name: str, length: int) -> bytes:
    try:
        value = bytes.fromhex(_field(message, name, str))
    except ValueError:
        raise FrameError(f"the greeting has no proper {name!r}") from None
    if len(value) != length:
        raise FrameError(f"the greeting has no proper {name!r}")
    return value


def _lease(message: dict[str, Any]) -> int:
    lease: int = _field(message, "testimony", int)
    if not 0 < lease < LARGEST_LEASE:
        raise FrameError("the greeting has no proper 'testimony'")
    return lease


def _check_version(theirs: int, them: str, us: str) -> None:
    if theirs != PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"{us} speaks version {PROTOCOL_VERSION} of the protocol and {them} version {theirs}: "
            "all nodes of a job need the same version of rallypoint"
        )


class ServerHandshake:
    """The store's side, for one connection."""

    def __init__(
        self,
        run_id: str,
        secret: bytes | None,
        welcome: Welcome,
        owner_of: Callable[[int], Owner | None] = lambda _: None,
        boxes: Boxes | None = None,
    ) -> None:
        """`owner_of` knows whose the lease of this number is; `boxes` hold the secret."""
        self._run_id = run_id
        self._secret = secret
        self._welcome = welcome
        self._owner_of = owner_of
        self._boxes = boxes
        self._offered: dict[str, Any] | None = None  # the greeting of one who was offered boxes
        self._nonce = os.urandom(NONCE_BYTES)
        self._keys: Keys | None = None
        self._testimony: tuple[int, bytes] | None = None  # the lease, and the nonce, of one that is under way
        self._asker_nonce: bytes | None = None  # of one who asks for the job's name, and has still to prove that it may
        self.has_told_name = False
        self.vouched_lease: int | None = None  # a testimony was given; 0 if there is no such lease any more
        self.incoming: Seal | None = None
        self.outgoing: Seal | None = None
        self.is_over = False
        self.objection = ""  # to all but wardens

    def answer(self, body: bytes) -> bytes:
        """What to send for what came; once `is_over`, it is the welcome, and it and all that follows has the seals."""
        message = _decode(body)
        if self._offered is not None and "proof" not in message:
            return self._answer_unproven(self._offered)
        if self._keys is not None:
            return self._answer_proof(message, self._keys)
        if self._testimony is not None:
            return self._hear(message, *self._testimony)
        if self._asker_nonce is not None and self._secret is not None:
            return self._tell_name(message, self._secret, self._asker_nonce)
        if _field(message, "magic", str) != MAGIC:
            raise FrameError("this is no greeting of rallypoint's")
        _check_version(_field(message, "version", int), "the node", "the store")
        if "testimony" in message:
            self._testimony = _lease(message), _nonce(message, "nonce", NONCE_BYTES)
            return self._own_nonce()
        if self.objection:
            raise HandshakeRefused(self.objection)
        knows_it = _field(message, "secret", bool)
        if knows_it and self._secret is None:
            raise HandshakeRefused("the node has a secret, and this store has none")
        opens_boxes = self._boxes is not None and message.get("opens") is True
        if self._secret is not None and not knows_it and not opens_boxes:
            return self._answer_unproven(message)
        if opens_boxes:
            self._offered = message
        return self._challenge(message, self._secret) if self._secret is not None else self._answer_openly(message)

    def _challenge(self, message: dict[str, Any], secret: bytes) -> bytes:
        nonce = _nonce(message, "nonce", NONCE_BYTES)
        if "question" in message:
            self._asker_nonce = nonce
        else:
            self._keys = derive_keys(secret, self._run_id, nonce, self._nonce)
        return self._own_nonce({} if self._offered is None or self._boxes is None else {"boxes": dict(self._boxes.by_kind)})

    def _answer_unproven(self, message: dict[str, Any]) -> bytes:
        """To one who has no secret, and could find none."""
        if self._boxes is None or self._boxes.judge is None:
            raise HandshakeRefused(f"this store asks for a secret, and the node has none{self._advice()}")
        if objection := self._boxes.judge():
            raise HandshakeRefused(objection)
        self._keys = self._asker_nonce = self._offered = None
        return self._answer_openly(message)

    def _advice(self) -> str:
        kinds = " or ".join(self._boxes.by_kind) if self._boxes is not None else ""
        return f" and could not open what it is in ({kinds}); give the same --secret FILE to all nodes" if kinds else ""

    def _answer_openly(self, message: dict[str, Any]) -> bytes:
        if "question" in message:
            self.has_told_name = True
            return _encode({"job": self._run_id})
        self._check_job(_field(message, "run_id", str))
        return self._finish()

    def _own_nonce(self, more: Mapping[str, object] = {}) -> bytes:
        return _encode({"version": PROTOCOL_VERSION, "nonce": self._nonce.hex(), **more})

    def _hear(self, message: dict[str, Any], lease: int, nonce: bytes) -> bytes:
        """A testimony for a lease that has ended is as good as none, whoever gives it."""
        told = _nonce(message, "proof", PROOF_BYTES)
        owner = self._owner_of(lease)
        if owner is not None:
            key = testimony_key(self._secret if owner.is_proven else None, self._run_id, owner.token)
            due = hmac.digest(key, testimony_context(lease, nonce) + self._nonce, "sha256")
            if not hmac.compare_digest(told, due):
                raise HandshakeRefused(f"it testified for the owner of lease {lease} and could not prove to be its warden")
        self.vouched_lease = lease if owner is not None else 0
        return _encode({"heard": owner is not None})

    def _tell_name(self, message: dict[str, Any], secret: bytes, nonce: bytes) -> bytes:
        if not hmac.compare_digest(_nonce(message, "proof", PROOF_BYTES), name_proof(secret, nonce, self._nonce)):
            raise HandshakeRefused("the secret is not the same here as at the store")
        self.has_told_name = True
        return _encode({"job": self._run_id, "proof": name_proof(secret, nonce, self._nonce, self._run_id).hex()})

    def _answer_proof(self, message: dict[str, Any], keys: Keys) -> bytes:
        proof = _nonce(message, "proof", len(keys.proof))
        if not hmac.compare_digest(proof, keys.proof):
            self._refuse_other_job(proof)
            raise HandshakeRefused("the secret, or the name of the job, is not the same on the node as at the store")
        self.incoming, self.outgoing = Seal(keys.from_client), Seal(keys.from_server)
        return self._finish()

    def _refuse_other_job(self, proof: bytes) -> None:
        """Who said for which job it comes, and knows the secret, may be told more."""
        if self._offered is None or self._secret is None:
            return
        theirs = _field(self._offered, "run_id", str)
        theirs_keys = derive_keys(self._secret, theirs, _nonce(self._offered, "nonce", NONCE_BYTES), self._nonce)
        if hmac.compare_digest(proof, theirs_keys.proof):
            self._check_job(theirs)

    def _check_job(self, theirs: str) -> None:
        ours = short_name(self._run_id)
        if theirs != ours:
            raise HandshakeRefused(f"this is the store of job {ours!r}, and the node belongs to job {theirs!r}")

    def _finish(self) -> bytes:
        self.is_over = True
        return _encode({"incarnation": self._welcome.incarnation, "session": self._welcome.session})

    @staticmethod
    def refusal(reason: str) -> bytes:
        return _encode({"refused": reason[:TOLD_CHARACTERS]})


class Owner(Value):
    """Of a lease: the token of its session, and whether whoever began it has proven to know the secret."""

    token: str
    is_proven: bool = True


class ClientHandshake:
    """A node's side, for one connection. What cannot be understood is refused: whatever answers there is no store of ours."""

    def __init__(self, run_id: str, secret: Secret) -> None:
        """`secret` may be who finds it in the store's boxes."""
        self._run_id = run_id
        self.secret, self._opener = _known_and_opener(secret)  # the secret, once it is known
        self._nonce = os.urandom(NONCE_BYTES)
        self.incoming: Seal | None = None
        self.outgoing: Seal | None = None
        self.welcome: Welcome | None = None

    def hello(self) -> bytes:
        message = _greeting(self.secret, self._opener, self._nonce)
        if self.secret is None:
            message["run_id"] = short_name(self._run_id)
        return _encode(message)

    def answer(self, frame: bytes) -> bytes | None:
        """What to send for what came; None after the welcome, when all that follows has the seals."""
        if self.incoming is None:
            message = _accepting(frame)
            if self._opener is not None:
                self.secret, self._opener = _found(self._opener, message), None
                if self.secret is None and "boxes" in message:
                    return UNABLE
            if self.secret is not None:
                return self._prove(message, self.secret)
        else:
            message = _decode(self._open(frame, self.incoming))
        self.welcome = Welcome(_field(message, "incarnation", str), _field(message, "session", str))
        return None

    def _prove(self, message: dict[str, Any], secret: bytes) -> bytes:
        _check_version(_field(message, "version", int), "the store", "this node")
        keys = derive_keys(secret, self._run_id, self._nonce, _nonce(message, "nonce", NONCE_BYTES))
        self.incoming, self.outgoing = Seal(keys.from_server), Seal(keys.from_client)
        return _encode({"proof": keys.proof.hex()})

    @staticmethod
    def _open(frame: bytes, seal: Seal) -> bytes:
        try:
            return open_seal(frame, seal)
        except FrameError:
            _accepting(frame)  # a refusal has no seal: the store's key is not ours
            raise HandshakeRefused("the store could not prove that it knows the secret and the job") from None


class NameQuestion:
    """The side of who asks which job it is, for one connection."""

    def __init__(self, secret: Secret) -> None:
        self._secret, self._opener = _known_and_opener(secret)
        self._nonce = os.urandom(NONCE_BYTES)
        self._store_nonce: bytes | None = None
        self.job: str | None = None

    def hello(self) -> bytes:
        return _encode({**_greeting(self._secret, self._opener, self._nonce), "question": "job"})

    def answer(self, frame: bytes) -> bytes | None:
        """What to send for what came; None once the job is known."""
        message = _accepting(frame)
        if self._opener is not None:
            self._secret, self._opener = _found(self._opener, message), None
            if self._secret is None and "boxes" in message:
                return UNABLE
        if self._secret is not None and self._store_nonce is None:
            _check_version(_field(message, "version", int), "the store", "this program")
            self._store_nonce = _nonce(message, "nonce", NONCE_BYTES)
            return _encode({"proof": name_proof(self._secret, self._nonce, self._store_nonce).hex()})
        job: str = _field(message, "job", str)
        if self._secret is not None and self._store_nonce is not None:
            due = name_proof(self._secret, self._nonce, self._store_nonce, job)
            if not hmac.compare_digest(_nonce(message, "proof", PROOF_BYTES), due):
                raise HandshakeRefused("the store could not prove that it knows the secret")
        self.job = job
        return None


def _known_and_opener(secret: Secret) -> tuple[bytes | None, Opener | None]:
    return (secret, None) if secret is None or isinstance(secret, bytes) else (None, secret)


def _greeting(secret: bytes | None, opener: Opener | None, nonce: bytes) -> dict[str, Any]:
    message = {"magic": MAGIC, "version": PROTOCOL_VERSION, "secret": secret is not None, "nonce": nonce.hex()}
    return message if opener is None else {**message, "opens": True}


def _found(opener: Opener, message: dict[str, Any]) -> bytes | None:
    """The secret, from the first thing that a store says; None where it has none, or none that we can open."""
    offered = message.get("boxes", {})
    if type(offered) is not dict or not all(type(text) is str for text in offered.values()):
        raise FrameError("the greeting has no proper 'boxes'")
    if "boxes" in message:
        _check_version(_field(message, "version", int), "the store", "this node")
    secret = opener.open(offered) if offered else None
    if secret is None and opener.has_opened:
        raise HandshakeRefused("this store cannot show that it knows the job's secret, as the one before could")
    return secret


def _accepting(frame: bytes) -> dict[str, Any]:
    """What the store says, if it does not refuse; its sentence is shown, so it is kept to what can be printed."""
    message = _decode(frame)
    if "refused" in message:
        told: str = _field(message, "refused", str)[:TOLD_CHARACTERS]
        raise HandshakeRefused("".join(one if one.isprintable() else "?" for one in told))
    return message
