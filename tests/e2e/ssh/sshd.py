"""A real sshd for three hosts: addresses of loopback, each with a name in a configuration of ssh's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import ports

NAMES = ("alpha", "beta", "gamma")
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PATH = f"{os.environ['PATH']}:/usr/sbin"
SERVER = """
Port {port}
{listen}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
"""
CLIENT = """
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/{key}
"""
ALL = """
Host *
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
"""


class Sshd:
    """Names that ssh knows with `command`, and those behind them. `deaf` has no key, `absent` no server."""

    def __init__(self, folder: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.port, self.process = folder, port, process
        self.command = f"ssh -F {folder}/config"
        hosts = list(zip(NAMES, ADDRESSES, strict=True))
        entries = [self._entry(name, address) for name, address in hosts]
        entries += [self._entry("deaf", ADDRESSES[0], key="other"), self._entry("absent", "127.0.0.9")]
        self.write(entries)

    def _entry(self, name: str, address: str, port: int = 0, key: str = "key") -> str:
        return CLIENT.format(name=name, address=address, port=port or self.port, folder=self.folder, key=key)

    def write(self, entries: Sequence[str]) -> None:
        (self.folder / "config").write_text("".join([*entries, ALL]))

    def lead_through(self, relays: Sequence[int]) -> None:
        """Reach them at these ports instead."""
        pairs = zip(NAMES, ADDRESSES, relays, strict=True)
        self.write([self._entry(name, address, port) for name, address, port in pairs])

    def far(self) -> list[int]:
        """What runs on the hosts now, besides sshd."""
        parents = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                parents[int(pid)] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it is gone
                continue
        below, found = {self.process.pid}, 1
        while found:
            new = {pid for pid, parent in parents.items() if parent in below} - below
            below, found = below | new, len(new)
        return [pid for pid in below if name_of(pid) not in ("sshd", "")]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def start_sshd(folder: Path, wait_until: Callable[..., Any]) -> Iterator[Sshd]:
    program = shutil.which("sshd", path=PATH)
    if program is None:
        pytest.skip("not installed: sshd")
    Path("/run/sshd").mkdir(exist_ok=True)  # where it confines itself
    for name in ("host", "key", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = ports.free_ports(1)[0]
    listen = "\n".join(f"ListenAddress {address}" for address in ADDRESSES)
    (folder / "sshd_config").write_text(SERVER.format(port=port, listen=listen, folder=folder))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "-D", "-e", "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: not all(ports.is_free(port, address) for address in ADDRESSES))
        yield Sshd(folder, port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
