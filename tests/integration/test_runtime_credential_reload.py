"""Keys and certificates are replaced under running servers, channels and processes."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio
from aiohttp import web

from forge.cli.credentials.certs_authority import HOST_CA, HOST_CERT, HOST_KEY, Authority
from forge.core.errors import ConfigError
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo import FULL_NAME, SCOPES, EchoServicer, EchoStub, add_to_server
from tests.support.runtime.etcd import Certificates, EtcdServer
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

TIMEOUT_S = 60.0
KEY = b"k" * 32


@dataclass(frozen=True)
class Host:
    """The certificate files of one host."""

    folder: Path

    def issue(self, ca: Path) -> Host:
        """Replace all files with new ones of the CA's directory."""
        Authority.load(ca).issue(
            ["127.0.0.1"], self.folder, days=1, common_name=self.folder.name, replace=True
        )
        return self

    def trust(self, ca: Path) -> None:
        """Replace the trusted CAs, at once as `install` does."""
        unfinished = self.folder / "unfinished"
        unfinished.write_bytes((ca / "ca.pem").read_bytes())
        unfinished.replace(self.folder / HOST_CA)

    def security(self, key: bytes = KEY) -> Security:
        files = self.files()
        return Security(
            Keyring.from_bytes(key),
            subject=self.folder.name,
            tls_cert=files["tls_cert"],
            tls_key=files["tls_key"],
            tls_ca=files["tls_ca"],
        )

    def files(self) -> dict[str, str]:
        names = {"tls_cert": HOST_CERT, "tls_key": HOST_KEY, "tls_ca": HOST_CA}
        return {setting: str(self.folder / name) for setting, name in names.items()}


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    Authority.init(tmp_path / "ca", days=2)
    return tmp_path / "ca"


@pytest.fixture
def server_host(tmp_path: Path, ca: Path) -> Host:
    return Host(tmp_path / "server").issue(ca)


@pytest.fixture
def client_host(tmp_path: Path, ca: Path) -> Host:
    return Host(tmp_path / "client").issue(ca)


def rotate(ca: Path) -> None:
    Authority.load(ca).rotate(days=2)


def finish(ca: Path) -> None:
    Authority.load(ca).finish_rotation()


def reload(security: Security) -> None:
    """As two periods of the process do."""
    assert not security.reload_tls(), "a change may be incomplete"
    assert security.reload_tls()
    assert not security.reload_tls(), "a change is read once"


async def subject(address: str, security: Security) -> str:
    """The caller's subject in the answer over a new connection."""
    channels = Channels(security)
    try:
        answer: bytes = await EchoStub(channels.get(address)).Unary(b"who", timeout=TIMEOUT_S)
        return answer.decode()
    finally:
        await channels.close()


async def assert_refused(address: str, security: Security) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await subject(address, security)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class Echo:
    """A child process that serves with the files of `host` and a key file."""

    def __init__(self, folder: Path, host: Host, endpoint: str, cluster: str) -> None:
        self.key_file = folder / "key"
        self.write_keys(KEY)
        self._log = folder / "echo.log"
        self._log.touch()
        flags = {"etcd": endpoint, "cluster": cluster, "key-file": str(self.key_file)}
        flags |= {"log-file": str(self._log), "instance-id": "echo-1", "lease-ttl-s": "30"}
        flags |= {"reload-period-s": "0.5"}
        flags |= {name.replace("_", "-"): path for name, path in host.files().items()}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        self.process: ServiceProcess = start_service("tests.support.runtime.echo_service", *words)

    def write_keys(self, *keys: bytes) -> None:
        unfinished = self.key_file.with_suffix(".new")
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(b"\n".join(keys))
        unfinished.replace(self.key_file)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in log_lines(self._log) if line["event"] == event]

    async def serving(self) -> dict[str, Any]:
        return (await until(lambda: self.logged("serving")))[0]

    async def reloaded(self, files: str, change: Callable[[], object]) -> None:
        """Make a change; return once the process has read it."""

        def count() -> int:
            events = self.logged("credentials_reloaded")
            return len([line for line in events if line["files"] == files])

        before = count()
        change()
        await until(lambda: count() > before)


@pytest_asyncio.fixture
async def echo(
    tmp_path: Path, server_host: Host, etcd: EtcdServer, cluster: str
) -> AsyncIterator[Echo]:
    started = Echo(tmp_path, server_host, etcd.endpoint, cluster)
    yield started
    started.process.kill()
    await asyncio.to_thread(started.process.wait)


async def get_metrics(address: str, client: Host) -> str:
    context = ssl.create_default_context(cafile=client.files()["tls_ca"])
    context.load_cert_chain(client.files()["tls_cert"], client.files()["tls_key"])
    async with aiohttp.ClientSession() as session:
        url = f"https://{address}/metrics"
        async with session.get(url, ssl=context) as response:
            return await response.text()


async def test_ca_is_rotated_under_a_running_process(
    echo: Echo, server_host: Host, client_host: Host, ca: Path, tmp_path: Path
) -> None:
    """The old certificate is accepted until its CA is removed; gRPC and /metrics never stop."""
    serving = await echo.serving()
    address, metrics = serving["address"], serving["metrics"]
    old = Host(tmp_path / "old").issue(ca)
    assert await subject(address, old.security()) == "old"
    rotate(ca)
    await echo.reloaded("tls", lambda: server_host.trust(ca))
    old.trust(ca)
    client_host.issue(ca)
    assert await subject(address, client_host.security()) == "client"
    await echo.reloaded("tls", lambda: server_host.issue(ca))
    assert await subject(address, old.security()) == "old"
    finish(ca)
    client_host.trust(ca)
    # The server's new certificate has replaced the old one: the client trusts the new CA alone.
    assert await subject(address, client_host.security()) == "client"
    assert "forge_" in await get_metrics(metrics, client_host)
    await echo.reloaded("tls", lambda: server_host.trust(ca))
    assert await subject(address, client_host.security()) == "client"
    assert "forge_" in await get_metrics(metrics, client_host)
    await assert_refused(address, old.security())
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await get_metrics(metrics, old)


@pytest.fixture
def etcd_host(tmp_path: Path, ca: Path) -> Host:
    return Host(tmp_path / "etcd-host").issue(ca)


@pytest_asyncio.fixture
async def tls_etcd(tmp_path: Path, etcd_host: Host) -> AsyncIterator[EtcdServer]:
    """It reads its certificate for each handshake, and its CA at its start."""
    files = etcd_host.files()
    tls = Certificates(ca=files["tls_ca"], cert=files["tls_cert"], key=files["tls_key"])
    server = EtcdServer(tmp_path / "etcd", tls=tls)
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)


async def coordinator(server: EtcdServer, host: Host, cluster: str) -> Coordinator:
    security = host.security()
    endpoint = f"https://{server.endpoint}"
    return await Coordinator.connect(
        endpoint,
        cluster=cluster,
        timeout_s=TIMEOUT_S,
        credentials=security.etcd_credentials(endpoint),
        signatures=security,
    )


async def test_process_stays_in_discovery_when_the_ca_of_etcd_is_rotated(
    server_host: Host, etcd_host: Host, tls_etcd: EtcdServer, ca: Path, tmp_path: Path, cluster: str
) -> None:
    """etcd restarts with a certificate of the new CA alone; the process updates its entry there."""
    echo = Echo(tmp_path, server_host, f"https://{tls_etcd.endpoint}", cluster)
    channels: Channels | None = None
    try:
        address = (await echo.serving())["address"]
        rotate(ca)
        await echo.reloaded("tls", lambda: server_host.trust(ca))
        await echo.reloaded("tls", lambda: server_host.issue(ca))
        finish(ca)
        etcd_host.issue(ca)
        await asyncio.to_thread(tls_etcd.restart)
        channels = Channels(server_host.security())
        await EchoStub(channels.get(address)).Unary(b"paint:blue", timeout=TIMEOUT_S)
        observer = await coordinator(tls_etcd, etcd_host, cluster)
        try:
            discovery = observer.discover("echo")
            await until(
                lambda: [one.metadata.get("color") for one in discovery.instances] == ["blue"]
            )
        finally:
            await observer.close()
    finally:
        if channels is not None:
            await channels.close()
        echo.process.kill()
        await asyncio.to_thread(echo.process.wait)


async def test_open_watch_continues_with_the_new_ca_of_etcd(
    client_host: Host, etcd_host: Host, tls_etcd: EtcdServer, ca: Path, cluster: str
) -> None:
    """It stays open when the credentials change, and opens again when its connection ends."""
    observer = await coordinator(tls_etcd, client_host, cluster)
    try:
        discovery = observer.discover("echo")
        rotate(ca)
        client_host.issue(ca)
        credentials = client_host.security().etcd_credentials(f"https://{tls_etcd.endpoint}")
        assert credentials is not None
        await discovery.known()
        observer.use(credentials)
        first = await coordinator(tls_etcd, etcd_host, cluster)
        await first.register("echo", "echo-1", "127.0.0.1:1")
        await until(lambda: len(discovery.instances) == 1)
        await first.close()
        finish(ca)
        etcd_host.issue(ca)
        await asyncio.to_thread(tls_etcd.restart)
        second = await coordinator(tls_etcd, etcd_host, cluster)
        await second.register("echo", "echo-2", "127.0.0.1:2")
        await until(lambda: "echo-2" in [one.instance_id for one in discovery.instances])
        await second.close()
    finally:
        await observer.close()


async def test_wrong_files_keep_the_earlier_certificates(
    echo: Echo, server_host: Host, client_host: Host, ca: Path
) -> None:
    """One warning names the setting and the reason; complete files are then read."""
    address = (await echo.serving())["address"]
    certificate = Path(server_host.files()["tls_cert"])
    certificate.write_bytes(certificate.read_bytes()[:200])
    (line,) = await until(lambda: echo.logged("credentials_not_reloaded"))
    assert line["level"] == "warning"
    assert f"tls_cert = '{certificate}' is not a certificate of tls_key" in line["error"]
    assert await subject(address, client_host.security()) == "client"
    await echo.reloaded("tls", lambda: server_host.issue(ca))
    assert await subject(address, client_host.security()) == "client"
    assert len(echo.logged("credentials_not_reloaded")) == 1


async def test_signing_key_is_rotated_under_a_running_process(
    echo: Echo, client_host: Host, etcd: EtcdServer, cluster: str
) -> None:
    """Tokens of the removed key are refused; the new key signs the entry in discovery."""
    address, new = (await echo.serving())["address"], secrets.token_hex(32).encode()
    with pytest.raises(grpc.aio.AioRpcError, match="not signed by this cluster's key"):
        await subject(address, client_host.security(new))
    await echo.reloaded("key_file", lambda: echo.write_keys(new, KEY))
    assert await subject(address, client_host.security(KEY)) == "client"
    assert await subject(address, client_host.security(new)) == "client"
    signatures = client_host.security(new)
    observer = await Coordinator.connect(etcd.endpoint, cluster=cluster, signatures=signatures)
    try:
        (instance,) = await observer.discover("echo").wait(timeout_s=TIMEOUT_S)
        assert instance.address == address
    finally:
        await observer.close()
    await echo.reloaded("key_file", lambda: echo.write_keys(new))
    assert await subject(address, client_host.security(new)) == "client"
    with pytest.raises(grpc.aio.AioRpcError, match="not signed by this cluster's key"):
        await subject(address, client_host.security(KEY))


async def test_open_channels_use_the_new_certificate(
    server_host: Host, client_host: Host, ca: Path
) -> None:
    """A call in flight ends on the connection before; later calls show the new certificate."""
    server_security, client_security = server_host.security(), client_host.security()
    servicer = EchoServicer()
    server = RpcServer(service="echo", host="127.0.0.1", port=0, security=server_security)
    server.add_service(add_to_server, servicer, full_name=FULL_NAME, scopes=SCOPES)
    channels = Channels(client_security)
    try:
        stub = EchoStub(channels.get(await server.start()))
        waiting = asyncio.ensure_future(stub.Unary(b"wait", timeout=TIMEOUT_S))
        await servicer.entered.wait()
        rotate(ca)
        finish(ca)
        for host, security in ((server_host, server_security), (client_host, client_security)):
            host.issue(ca)
            reload(security)
        channels.renew()
        assert await stub.Unary(b"who", timeout=TIMEOUT_S) == b"client"
        servicer.gate.set()
        assert await waiting == b"waited"
    finally:
        await channels.close()
        await server.stop(grace_s=0)


async def test_http_listener_presents_the_new_certificate(server_host: Host, ca: Path) -> None:
    """Its clients have tokens and no certificates."""
    security = server_host.security()
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=security.http_context("127.0.0.1"))
    await site.start()
    port = runner.addresses[0][1]

    async def status() -> int:
        trust = ssl.create_default_context(cafile=str(ca / "ca.pem"))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{port}/", ssl=trust) as response,
        ):
            return response.status

    try:
        assert await status() == 404
        rotate(ca)
        finish(ca)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status()
        server_host.issue(ca)
        reload(security)
        assert await status() == 404
    finally:
        await runner.cleanup()


def test_key_of_another_certificate_is_refused_once(server_host: Host, client_host: Host) -> None:
    """Certificate and key are two files: between their replacements they do not match."""
    security = server_host.security()
    Path(server_host.files()["tls_key"]).write_bytes(
        Path(client_host.files()["tls_key"]).read_bytes()
    )
    assert not security.reload_tls()
    with pytest.raises(ConfigError, match="is not a certificate of tls_key"):
        security.reload_tls()
    assert not security.reload_tls()
