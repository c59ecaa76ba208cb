"""The certificates of a host: lifetime, names, key and authority."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from forge.cli.finding import Finding

RENEW = timedelta(days=21)
"""Remaining lifetime at which a certificate is a problem."""


class CertificateFiles(NamedTuple):
    """PEM files of one host, as the settings of its services name them."""

    cert: str
    key: str
    ca: str


def certificate_findings(
    files: CertificateFiles, hosts: Collection[str], *, now_unix_s: float
) -> Iterator[Finding]:
    """Yields one finding for each problem, or one for sound files. `hosts`: names and addresses at
    which others reach the services with these files."""
    try:
        chain = x509.load_pem_x509_certificates(Path(files.cert).read_bytes())
        trusted = x509.load_pem_x509_certificates(Path(files.ca).read_bytes()) if files.ca else []
    except OSError as error:
        yield Finding(ok=False, text=f"{error.filename}: {error.strerror}", remedy=_ISSUE)
        return
    except ValueError:
        yield Finding(
            ok=False, text=f"{files.cert} or {files.ca}: no PEM certificate", remedy=_ISSUE
        )
        return
    host, now = chain[0], datetime.fromtimestamp(now_unix_s, UTC)
    problems = [
        *_lifetime(files.cert, host, now),
        *(one for ca in trusted for one in _lifetime(files.ca, ca, now)),
        *_names(files.cert, host, hosts),
        *_authority(files, host, trusted),
        *_key(files.key, host),
    ]
    yield from problems
    if not problems:
        until = f"{host.not_valid_after_utc:%Y-%m-%d}"
        yield Finding(
            ok=True, text=f"certificate {files.cert}: {_joined(names_of(host))} until {until}"
        )


_ISSUE = (
    "Issue it again where the CA is (`forge certs issue NAMES --replace`) and copy the files; "
    "running services load them."
)


def _lifetime(path: str, certificate: x509.Certificate, now: datetime) -> Iterator[Finding]:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    is_ca = certificate.issuer == certificate.subject
    remedy = "Replace the CA: `forge certs rotate` has the steps." if is_ca else _ISSUE
    if now < begins:
        text = f"{path} is valid only from {begins:%Y-%m-%d %H:%M}"
        yield Finding(ok=False, text=text, remedy=f"{remedy} Or correct this host's clock.")
    elif ends <= now:
        yield Finding(ok=False, text=f"{path} expired on {ends:%Y-%m-%d}", remedy=remedy)
    elif ends - now < RENEW:
        text = f"{path} expires on {ends:%Y-%m-%d}, in {(ends - now).days} days"
        yield Finding(ok=False, text=text, remedy=remedy)


def _names(path: str, certificate: x509.Certificate, hosts: Collection[str]) -> Iterator[Finding]:
    names = names_of(certificate)
    missing = [host for host in sorted(hosts) if not _has(names, host.strip("[]"))]
    if missing:
        text = f"{path} is for {_joined(names)}, and others reach this host as {_joined(missing)}"
        yield Finding(ok=False, text=text, remedy=_ISSUE)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Returns the DNS names and IP addresses of a certificate."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    dns = extension.value.get_values_for_type(x509.DNSName)
    return [*dns, *map(str, extension.value.get_values_for_type(x509.IPAddress))]


def _has(names: Sequence[str], host: str) -> bool:
    try:
        return str(ipaddress.ip_address(host)) in names
    except ValueError:
        return host in names or f"*.{host.partition('.')[2]}" in names


def _authority(
    files: CertificateFiles, host: x509.Certificate, trusted: Sequence[x509.Certificate]
) -> Iterator[Finding]:
    if trusted and not any(is_issued_by(host, one) for one in trusted):
        text = f"{files.cert} is signed by no certificate in {files.ca}"
        yield Finding(ok=False, text=text, remedy=_ISSUE)


def is_issued_by(host: x509.Certificate, authority: x509.Certificate) -> bool:
    """Returns whether an authority has signed a host's certificate."""
    try:
        host.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _key(path: str, host: x509.Certificate) -> Iterator[Finding]:
    try:
        key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        readable = stat.S_IMODE(Path(path).stat().st_mode) & stat.S_IROTH
    except PermissionError:
        # The service's own user may read it.
        return
    except (OSError, ValueError, TypeError):
        text = f"{path} is not a PEM key without password"
        yield Finding(ok=False, text=text, remedy=_ISSUE)
        return
    if key.public_key() != host.public_key():
        yield Finding(ok=False, text=f"{path} is the key of another certificate", remedy=_ISSUE)
    if readable:
        remedy = f"chmod o-r {path}, and issue the certificate again if others have logins here."
        yield Finding(ok=False, text=f"{path} can be read by every user", remedy=remedy)


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) or "no name"
