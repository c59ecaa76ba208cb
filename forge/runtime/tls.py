"""TLS between hosts.

Without TLS, Forge listens on the loopback interface only, unless `insecure` is set.
"""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

import grpc

from forge.core.errors import ConfigError


class Tls:
    """The certificate files of a process, and the rule for plain TCP."""

    def __init__(
        self, *, cert: str, key: str, ca: str, client_auth: bool = True, insecure: bool = False
    ) -> None:
        if bool(cert) != bool(key):
            raise ConfigError("tls_cert and tls_key must be set together")
        self._cert = read_pem("tls_cert", cert)
        self._key = read_pem("tls_key", key)
        self._ca = read_pem("tls_ca", ca)
        self._files = cert, key, ca
        self._client_auth = client_auth
        self._insecure = insecure

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """TLS with a certificate, else None (plain TCP). Raises ConfigError where TLS is needed."""
        if self._cert is None or self._key is None:
            self.require_plain_allowed(host)
            return None
        mutual = self._client_auth and self._ca is not None
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)],
            root_certificates=self._ca if mutual else None,
            require_client_auth=mutual,
        )

    def metrics_context(self, host: str) -> ssl.SSLContext | None:
        """TLS of /metrics, as `server_credentials`: its clients show certificates, not tokens."""
        cert, key, ca = self._files
        if not cert:
            self.require_plain_allowed(host)
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(cert, key)
            if ca and self._client_auth:
                context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise ConfigError(f"tls_cert = {cert!r}, tls_key, tls_ca: {error}") from None
        return context

    def channel_credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS with a `tls_ca`, else None (plain TCP). Raises ConfigError where TLS is needed."""
        if self._ca is None:
            self.require_plain_allowed(address.rpartition(":")[0])
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self._ca, private_key=self._key, certificate_chain=self._cert
        )

    def etcd_credentials(self, endpoints: str) -> grpc.ChannelCredentials | None:
        """TLS for https:// endpoints, with this host's certificate if it has one; else None.

        Raises ConfigError where TLS is needed.
        """
        if "https://" not in endpoints:
            self._require_plain_etcd_allowed(endpoints)
            return None
        if self._ca is None:
            raise ConfigError(f"etcd = {endpoints!r} is TLS, so tls_ca must be set")
        return grpc.ssl_channel_credentials(
            root_certificates=self._ca, private_key=self._key, certificate_chain=self._cert
        )

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
