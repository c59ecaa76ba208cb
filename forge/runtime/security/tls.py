"""TLS between hosts.

Without TLS, Forge listens on the loopback interface only, unless `insecure` is set. Replaced files
are valid for later connections; open ones stay.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from forge.core.errors import ConfigError
from forge.runtime.files.changes import FileChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pem:
    """The content of the certificate files at one time."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    http: ssl.SSLContext | None
    """Context of listeners whose clients have tokens."""
    mutual: ssl.SSLContext | None
    """Context of listeners whose clients have certificates, with a `tls_ca` and
    `client_auth`."""
    client: ssl.SSLContext | None
    """Context of connections to other hosts, with a `tls_ca`."""


class Tls:
    """The certificate files of a process, and the rule for plain TCP."""

    def __init__(
        self, *, cert: str, key: str, ca: str, client_auth: bool = True, insecure: bool = False
    ) -> None:
        if bool(cert) != bool(key):
            raise ConfigError("tls_cert and tls_key must be set together")
        self._paths = cert, key, ca
        self._client_auth = client_auth
        self._insecure = insecure
        self._changes = FileChanges(cert, key, ca)
        self._pem = self._read()

    def reload_tls(self) -> bool:
        """Read changed files; return whether they changed. Raises ConfigError, once for each
        change, for files that are invalid together; the ones before stay in use."""
        if not self._changes.settled():
            return False
        self._pem = self._read()
        return True

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """TLS with a certificate, else None (plain TCP). Raises ConfigError where TLS is needed."""
        served = self._pem
        if served.cert is None:
            self.require_plain_allowed(host)
            return None

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # Called by gRPC's threads, before each handshake.
            nonlocal served
            if served is self._pem:
                return None
            served = self._pem
            return _server_configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(served),
            changed,  # type: ignore[arg-type]  # None: no change
            require_client_authentication=served.mutual is not None,
        )

    def http_context(self, host: str) -> ssl.SSLContext | None:
        """TLS of an HTTP listener without client certificates, as `server_credentials`."""
        if (context := self._pem.http) is None:
            self.require_plain_allowed(host)
            return None

        def present(connection: ssl.SSLSocket | ssl.SSLObject, *_: object) -> None:
            assert self._pem.http is not None
            connection.context = self._pem.http

        context.sni_callback = present
        return context

    def connection_context(self) -> ssl.SSLContext | None:
        """TLS of the next connection to a listener without tokens; None for plain TCP."""
        return self._pem.mutual or self._pem.http

    def channel_credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS with a `tls_ca`, else None (plain TCP). Raises ConfigError where TLS is needed."""
        if self._pem.ca is None:
            self.require_plain_allowed(address.rpartition(":")[0])
            return None
        return self._client_credentials()

    def client_context(self, host: str) -> ssl.SSLContext | None:
        """TLS of a connection to another host that is no channel, as `channel_credentials`."""
        if self._pem.client is None:
            self.require_plain_allowed(host)
        return self._pem.client

    def etcd_credentials(self, endpoints: str) -> grpc.ChannelCredentials | None:
        """TLS for https:// endpoints, with this host's certificate if it has one; else None.

        Raises ConfigError where TLS is needed.
        """
        if "https://" not in endpoints:
            self._require_plain_etcd_allowed(endpoints)
            return None
        if self._pem.ca is None:
            raise ConfigError(f"etcd = {endpoints!r} is TLS, so tls_ca must be set")
        return self._client_credentials()

    def _require_plain_etcd_allowed(self, endpoints: str) -> None:
        if not self._insecure and not is_loopback_etcd(endpoints):
            raise ConfigError(
                f"etcd = {endpoints!r} is plaintext beyond loopback: write https://host:port and "
                "set tls_ca (or insecure = true on a network you trust)"
            )

    def require_plain_allowed(self, host: str) -> None:
        """Raises ConfigError where plain TCP to `host` is not allowed."""
        if not self._insecure and not is_loopback(host):
            raise ConfigError(
                f"host = {host!r} is not a loopback address, so TLS is needed: set tls_cert, "
                f"tls_key and tls_ca (or insecure = true on a network you trust)"
            )

    def _client_credentials(self) -> grpc.ChannelCredentials:
        pem = self._pem
        return grpc.ssl_channel_credentials(
            root_certificates=pem.ca, private_key=pem.key, certificate_chain=pem.cert
        )

    def _read(self) -> _Pem:
        cert, key, ca = self._paths
        pem_ca = read_pem("tls_ca", ca)
        client = None
        if pem_ca is not None:
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _trust(client, ca)
        mutual = cert and ca and self._client_auth
        return _Pem(
            cert=read_pem("tls_cert", cert),
            key=read_pem("tls_key", key),
            ca=pem_ca,
            http=_listener_context(cert, key) if cert else None,
            mutual=_listener_context(cert, key, ca) if mutual else None,
            client=client and _with_certificate(client, cert, key),
        )


def _server_configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.cert is not None
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.cert)], root_certificates=pem.ca if pem.mutual else None
    )


def _listener_context(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    context = _with_certificate(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), cert, key)
    if client_ca:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _with_certificate(context: ssl.SSLContext, cert: str, key: str) -> ssl.SSLContext:
    if not cert:
        return context
    try:
        # An encrypted key is an error, not a prompt.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert = {cert!r} is not a certificate of tls_key = {key!r}: {error}"
        ) from None
    return context


def _trust(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"tls_ca = {ca!r} has no certificate: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_loopback_etcd(endpoints: str) -> bool:
    """Whether all endpoints of etcd are loopback addresses."""
    addresses = [one.strip().rpartition("//")[2] for one in endpoints.split(",")]
    return all(is_loopback(one.rpartition(":")[0]) for one in addresses if one)


def read_pem(name: str, path: str) -> bytes | None:
    """Read a PEM file, None for "". Raises `ConfigError` with the setting `name` and the path."""
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} = {path!r}: {error.strerror}") from None
