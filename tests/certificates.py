"""Certificates for tests of TLS: an authority, what it has signed, and another authority that nobody should trust."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT_S = 30.0
DAYS = "2"
LOOPBACK_NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"


class Certificates(NamedTuple):
    """Paths of PEM files."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path  # has signed none of the certificates above
    stranger_cert: Path  # signed by the other authority
    stranger_key: Path


def make_certificates(folder: Path) -> Certificates:
    """A new set in `folder`; a test that asks is skipped where there is no openssl.

    The server's certificate also serves as a client's, for etcd's gateway is a client of etcd itself and shows it.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make certificates with")
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key = _authority(folder, "ca")
    other_ca, other_key = _authority(folder, "other_ca")
    server = _signed(folder, "server", ca, ca_key, "serverAuth,clientAuth")
    client = _signed(folder, "client", ca, ca_key, "clientAuth")
    stranger = _signed(folder, "stranger", other_ca, other_key, "clientAuth")
    return Certificates(ca, *server, *client, other_ca, *stranger)


def _authority(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}_key.pem"
    _openssl(
        "req", "-x509", *_new_key(key), "-out", cert, "-days", DAYS, "-subj", f"/CN=test {name}",
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    return cert, key


def _signed(folder: Path, name: str, ca: Path, ca_key: Path, uses: str) -> tuple[Path, Path]:
    cert, key, request, extensions = (folder / f"{name}{suffix}" for suffix in (".pem", "_key.pem", ".csr", ".ext"))
    extensions.write_text(f"subjectAltName={LOOPBACK_NAMES}\nextendedKeyUsage={uses}\nbasicConstraints=CA:FALSE\n")
    _openssl("req", *_new_key(key), "-out", request, "-subj", f"/CN={name}")
    _openssl(
        "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert, "-days", DAYS,
        "-extfile", extensions,
    )  # fmt: skip
    return cert, key


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path


def _openssl(*args: str | Path) -> None:
    answer = subprocess.run(["openssl", *args], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr
