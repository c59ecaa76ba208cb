"""Access to a session: the gateway's address, the token, TLS.

Owns the environment variables of a session client, and the channel's credentials. The token alone
identifies the rollout; a client certificate only opens the connection to a gateway that requires
one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from forge.core.errors import ConfigError
from forge.runtime.security.tls import read_pem


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address and credentials of a session client."""

    address: str
    """The gateway's gRPC "host:port"."""
    token: str
    tls_ca: str = ""
    """PEM certificates that verify the gateway; "" for plain TCP."""
    tls_cert: str = ""
    """PEM certificate chain of this client, if the gateway requires one (mutual TLS)."""
    tls_key: str = ""
    """PEM private key of `tls_cert`."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Access:
        """Read the access that a runner prepared for this process. Raises `ConfigError` with the
        name of a missing variable."""
        try:
            address, token = environ["FORGE_GRPC_ADDR"], environ["FORGE_SESSION_TOKEN"]
        except KeyError as error:
            raise ConfigError(
                f"{error.args[0]} is not set: start this program through `forge agents run`"
            ) from None
        return cls(
            address=address,
            token=token,
            tls_ca=environ.get("FORGE_TLS_CA", ""),
            tls_cert=environ.get("FORGE_TLS_CERT", ""),
            tls_key=environ.get("FORGE_TLS_KEY", ""),
        )

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials, or None for plain TCP. Raises `ConfigError` for missing files."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key must be set together")
        if not self.tls_ca:
            if self.tls_cert:
                raise ConfigError(
                    "tls_cert is set, tls_ca is not: set tls_ca to verify the gateway"
                )
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem("tls_ca", self.tls_ca),
            private_key=read_pem("tls_key", self.tls_key),
            certificate_chain=read_pem("tls_cert", self.tls_cert),
        )
