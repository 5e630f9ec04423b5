"""How to come at an etcd cluster: where its members are, and what they ask for to let us in."""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.coordination.engine import RefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any, Literal

__all__ = ["EtcdAccess", "access_of", "tls_context"]


class EtcdAccess(Value):
    """Every member that is known, and the paths of what TLS needs; without `ca_cert` the machine's own authorities count.

    Nobody waits longer than `read_timeout_s` for one answer.
    """

    endpoints: tuple[tuple[str, int], ...]
    protocol: Literal["http", "https"] = "http"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    read_timeout_s: float = 60.0

    def __repr__(self) -> str:
        """Without the password, since it may end up in a log."""
        return f"EtcdAccess({', '.join(self.names())}; protocol={self.protocol!r}, user={self.user!r})"

    def names(self) -> list[str]:
        """The endpoints, as users write them."""
        return [host_port(*endpoint) for endpoint in self.endpoints]


def access_of(client: Any) -> EtcdAccess:
    """The way to a cluster, from what stands for it: that itself, an endpoint as text, or a client of python-etcd."""
    if isinstance(client, EtcdAccess):
        return client
    if isinstance(client, str):
        name, _, number = client.rpartition(":")
        return EtcdAccess(((name.strip("[]"), int(number)),))
    host, port = getattr(client, "host", None), getattr(client, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        raise TypeError(f"an etcd client is an EtcdAccess, an endpoint as text, or one of python-etcd, not {client!r}")
    return EtcdAccess(((host, port),), "https" if getattr(client, "protocol", "http") == "https" else "http")


def tls_context(access: EtcdAccess) -> ssl.SSLContext | None:
    """What every connection to this cluster is made with; None where it speaks plain HTTP."""
    if access.protocol != "https":
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=access.ca_cert)
    except (OSError, ValueError) as error:
        raise RefusedError(f"the authorities in {access.ca_cert!r} cannot be used: {_told(error)}; see cacert") from None
    if access.cert is not None:
        try:
            context.load_cert_chain(access.cert, access.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            files = f"{access.cert!r} and {access.key or access.cert!r}"
            raise RefusedError(f"the certificate and key in {files} cannot be used: {_told(error)}; see cert and key") from None
    return context


def _no_passphrase() -> str:
    """A key with a passphrase would be asked for at the terminal, by every node."""
    raise ValueError("the key asks for a passphrase")


def _told(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
