"""Credentials of a process: the cluster's keys or an issued token, and TLS files.

Not here: the format of tokens (`tokens`), TLS (`tls`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from typing import Any

from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.tls import Tls
from forge.runtime.security.tokens import Claims, Keyring, narrow, new_token_id, sign_text
from forge.runtime.settings.service_config import CLOCK_TOLERANCE_S, ServiceConfig

_SERVICE_TOKEN_S = 3600.0


class Security(Tls):
    """Credentials of a process: key ring or token, TLS files, and the tokens of its own calls."""

    def __init__(
        self,
        credential: Keyring | Bearer,
        *,
        subject: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_ca: str = "",
        tls_client_auth: bool = True,
        insecure: bool = False,
        clock_tolerance_s: float = CLOCK_TOLERANCE_S,
    ) -> None:
        super().__init__(
            cert=tls_cert, key=tls_key, ca=tls_ca, client_auth=tls_client_auth, insecure=insecure
        )
        self._credential = credential
        self.revoked: Mapping[str, float] = {}
        """Expiry of each revoked token, by its id."""
        self.accept_unsigned = False
        """Accept directory entries without a signature."""
        self._subject = subject
        self._clock_tolerance_s = clock_tolerance_s
        self._tokens: dict[str, tuple[float, str]] = {}
        """Time of signing and service token, by audience."""

    @classmethod
    def from_config(cls, config: ServiceConfig, *, bearer: Bearer | None = None) -> Security:
        """Read the key file and the TLS files; a `bearer` replaces the key. Raises ConfigError."""
        if bearer is None and not config.key_file:
            raise ConfigError(
                "key_file is not set: all services of a cluster share one signing key "
                "(make one: forge key FILE); a runner may have a token_file instead"
            )
        security = cls(
            bearer or Keyring.from_file(config.key_file),
            subject=config.instance_id,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            tls_ca=config.tls_ca,
            tls_client_auth=config.tls_client_auth,
            insecure=config.insecure,
            clock_tolerance_s=config.clock_tolerance_s,
        )
        security.accept_unsigned = config.accept_unsigned
        return security

    @property
    def keyring(self) -> Keyring:
        """The cluster's keys. Raises ConfigError in a process that has a token only."""
        if isinstance(self._credential, Bearer):
            raise ConfigError("key_file is not set: this process has a token and no key")
        return self._credential

    @property
    def bearer(self) -> Bearer | None:
        """The issued token of a process without the key."""
        return self._credential if isinstance(self._credential, Bearer) else None

    def reload_key(self) -> bool:
        """As `Keyring.reload`; tokens and entries of this process are signed by the new key."""
        if isinstance(self._credential, Bearer) or not self._credential.reload():
            return False
        self._tokens.clear()
        return True

    def token_for(self, audience: str) -> str:
        """Return the token of this process's calls to a proto service, narrowed to it.

        It has scope "service" and is renewed at half its life; or it is the bearer's.
        """
        if isinstance(self._credential, Bearer):
            return narrow(self._credential.token(), audience)
        # Age by the monotonic clock: an operator may set the wall clock back.
        now_s = time.monotonic()
        made_s, token = self._tokens.get(audience, (-inf, ""))
        if now_s > made_s + _SERVICE_TOKEN_S / 2:
            claims = Claims(
                subject=self._subject,
                scopes=frozenset({"service"}),
                token_id=new_token_id(),
                audience=frozenset({audience}),
                issued_unix_s=time.time(),
                expires_unix_s=time.time() + _SERVICE_TOKEN_S,
            )
            token = self.keyring.sign(claims)
            self._tokens[audience] = (now_s, token)
        return token

    def sign_entry(self, text: str) -> Mapping[str, str]:
        """Return the signature of this process under an entry of the directory."""
        bearer = self._credential
        token = bearer.token() if isinstance(bearer, Bearer) else self.token_for("directory")
        return sign_text(token, text)

    def verify_entry(self, kind: str, text: str, fields: Mapping[str, Any]) -> None:
        """Raises Unauthenticated for an entry that no service, or runner as a runner, has signed.

        Without the key nothing can be verified: then TLS alone tells a service from a stranger.
        """
        if isinstance(self._credential, Bearer):
            return
        if "signature" not in fields:
            if self.accept_unsigned:
                return
            raise Unauthenticated("unsigned; accept_unsigned admits an earlier release")
        claims = self._credential.verify_signature(
            str(fields["signer"]), text, str(fields["signature"])
        )
        if claims.token_id in self.revoked:
            raise Unauthenticated(f"signed by the revoked token {claims.token_id}")
        if "service" not in claims.scopes and claims.scopes != {kind}:
            raise Unauthenticated(f"the signer {claims.subject} is no {kind}")

    def verify(self, token: str, audience: str = "") -> Claims:
        """Return the claims of a caller's token; `audience`: the called proto service.

        Raises Unauthenticated for a forged, expired or revoked token, and for another audience.
        """
        claims = self.keyring.verify(token, now_s=time.time(), tolerance_s=self._clock_tolerance_s)
        if claims.token_id in self.revoked:
            raise Unauthenticated(f"token {claims.token_id} of {claims.subject} is revoked")
        if audience and claims.audience and audience not in claims.audience:
            raise Unauthenticated(
                f"the token of {claims.subject} is for {', '.join(sorted(claims.audience))}, "
                f"not for {audience}"
            )
        return claims
