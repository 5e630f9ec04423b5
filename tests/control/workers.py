"""Real workers with a control socket, and a real HTTP client for them."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TORCH_WORKER_SERVER_SOCKET"


class UnixConnection(http.client.HTTPConnection):
    """http.client over a Unix socket."""

    def __init__(self, path: str | Path, timeout_s: float = 10.0) -> None:
        super().__init__("worker", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(path: str | Path, method: str, target: str, body: bytes | None = None) -> tuple[int, str]:
    """Status and text of one answer."""
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@contextmanager
def running(program: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process with this program, given its first line before the block; its end is waited for."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(
        command, env={**os.environ, **env}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Let a program that waits for its standard input go on, to its end."""
    out, err = process.communicate("\n", timeout=30)
    return process.returncode, out, err
