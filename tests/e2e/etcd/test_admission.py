"""Whom a cluster does not let in, or what is no cluster at all: one line that says what to do, and no worker is started. P32."""

from __future__ import annotations

import http.server
import socket
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates, make_certificates
from tests.e2e.etcd.conftest import QUICK
from tests.etcd_cluster import Cluster, start_cluster
from tests.pace import is_under

SECONDS = 8.0  # within which whoever cannot come in must have been told; one try takes 5 s where nobody answers
USER, PASSWORD = "trainer", "a password"


def told(job: Any, conf: str = "", **options: Any) -> str:
    """The last line of an agent that does not come in; there is one line with the error, and no worker."""
    began = time.monotonic()
    node = job.start(conf=",".join(filter(None, (QUICK, conf))), **options)
    assert node.wait() != 0
    assert is_under(time.monotonic() - began, SECONDS)
    assert node.starts() == []
    assert "Traceback" not in node.stderr
    (error,) = (line for line in node.stderr.splitlines() if line.startswith("rallyrun: error:"))
    assert error == node.stderr.splitlines()[-1]
    print(error)
    return str(error)


def works(job: Any, conf: str = "") -> None:
    """Two agents meet, and end well."""
    conf = ",".join(filter(None, (QUICK, conf)))
    nodes = [job.start(nnodes="2", workers=1, conf=conf) for _ in range(2)]
    assert sorted(node.wait_for_world(2)[0].rank for node in nodes) == [0, 1]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


# --- what is no cluster ----------------------------------------------------------------------------------------------------


class WebSite(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"lost\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web_site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebSite)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_web_site_is_no_etcd(job: Any, web_site: str):
    error = told(job, host=web_site)
    assert web_site in error
    assert "etcd" in error


def test_a_port_where_nobody_answers(job: Any):
    with socket.socket() as held:  # bound, so that nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{held.getsockname()[1]}"
        error = told(job, conf="join_timeout=1", host=where)
    assert where in error
    assert "connection refused" in error


def test_a_gateway_that_is_switched_off(make_job: Any, tmp_path: Path):
    with start_cluster(tmp_path / "etcd", flags=["--enable-grpc-gateway=false"]) as cluster:
        assert "--enable-grpc-gateway" in told(make_job(cluster))


# --- a cluster that asks who comes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The client's has no CommonName: where there are users besides, etcd's gateway takes no other, for it cannot be one."""
    folder = tmp_path_factory.mktemp("certificates")
    made = make_certificates(folder)
    cert, request, extensions = (folder / f"nameless.{suffix}" for suffix in ("pem", "csr", "ext"))
    extensions.write_text("extendedKeyUsage=clientAuth\n")
    openssl("req", "-new", "-key", made.client_key, "-out", request, "-subj", "/O=tests")
    signer = ("-CA", made.ca, "-CAkey", folder / "ca_key.pem", "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signer, "-out", cert, "-days", "2", "-extfile", extensions)
    return made._replace(client_cert=cert)


def openssl(*args: str | Path) -> None:
    answer = subprocess.run(["openssl", *args], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr


def encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def ask_for_password(cluster: Cluster) -> None:
    may = {"permType": "READWRITE", "key": encoded("/rallypoint/"), "range_end": encoded("/rallypoint0")}
    for path, body in (
        ("user/add", {"name": "root", "password": "root's"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "jobs"}),
        ("role/grant", {"name": "jobs", "perm": may}),
        ("user/add", {"name": USER, "password": PASSWORD}),
        ("user/grant", {"user": USER, "role": "jobs"}),
        ("enable", {}),
    ):
        answer = cluster.members[0].post(f"/v3/auth/{path}", body)
        assert "error" not in answer, answer


@pytest.fixture(scope="module")
def guarded(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It shows a certificate and asks for one, and for a user with a password."""
    folder = tmp_path_factory.mktemp("guarded")
    with start_cluster(folder, tls=certificates, flags=["--client-cert-auth"]) as cluster:
        ask_for_password(cluster)
        yield cluster


def password_file(tmp_path: Path, password: str) -> str:
    path = tmp_path / "password"
    path.write_text(f"{password}\n")
    return f"user={USER},password_file={path}"


def tls(certificates: Certificates) -> str:
    return f"protocol=https,cacert={certificates.ca},cert={certificates.client_cert},key={certificates.client_key}"


def test_a_job_with_all_that_is_asked_for(make_job: Any, guarded: Cluster, certificates: Certificates, tmp_path: Path):
    works(make_job(guarded), f"{tls(certificates)},{password_file(tmp_path, PASSWORD)}")


def test_torchruns_names_of_the_certificate(make_job: Any, guarded: Cluster, certificates: Certificates, tmp_path: Path):
    conf = tls(certificates).replace("cert=/", "ssl_cert=/").replace("cassl_cert", "cacert").replace(",key=", ",ssl_cert_key=")
    works(make_job(guarded), f"{conf},{password_file(tmp_path, PASSWORD)}")


def test_a_wrong_password(make_job: Any, guarded: Cluster, certificates: Certificates, tmp_path: Path):
    error = told(make_job(guarded), f"{tls(certificates)},{password_file(tmp_path, 'guessed')}")
    assert repr(USER) in error
    assert "password is wrong" in error
    assert "guessed" not in error


def test_no_password(make_job: Any, guarded: Cluster, certificates: Certificates):
    assert "a user and a password" in told(make_job(guarded), tls(certificates))


def test_a_wrong_authority(make_job: Any, guarded: Cluster, certificates: Certificates):
    conf = tls(certificates._replace(ca=certificates.other_ca))
    assert "see cacert" in told(make_job(guarded), conf)


def test_a_certificate_of_a_stranger(make_job: Any, guarded: Cluster, certificates: Certificates):
    strange = certificates._replace(client_cert=certificates.stranger_cert, client_key=certificates.stranger_key)
    assert "see cert and key" in told(make_job(guarded), tls(strange))


def test_http_where_https_is_spoken(make_job: Any, guarded: Cluster):
    assert "protocol" in told(make_job(guarded))
