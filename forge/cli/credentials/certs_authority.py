"""A certificate authority in a directory, and host certificates signed by it.

Owns the X.509 content and the PEM files. Not here: the arguments (`certs`), the use of the files
(`forge.runtime.security.tls`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.runtime.coordination.etcd_roles import is_user_name
from forge.runtime.files.private import write_private_file

CA_CERT, CA_KEY = "ca.pem", "ca-key.pem"
HOST_CERT, HOST_KEY, HOST_CA = "tls_cert.pem", "tls_key.pem", "tls_ca.pem"
_CLOCK_TOLERANCE = timedelta(days=1)
"""Certificates are valid from a day ago: the clocks of hosts differ."""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The certificates of a directory; all are trusted, the one of the key signs."""

    folder: Path
    signer: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    trusted: tuple[x509.Certificate, ...]

    @classmethod
    def init(cls, folder: Path, *, days: int) -> Authority:
        """Make an authority in a directory without one. Raises InvalidArgument."""
        for name in (CA_CERT, CA_KEY):
            if (folder / name).exists():
                raise InvalidArgument(f"{folder / name} exists; `forge certs rotate` replaces a CA")
        _make_folder(folder)
        certificate, key = _make_ca(days)
        _write(folder / CA_KEY, _key_pem(key), mode=0o600)
        _write(folder / CA_CERT, _pem(certificate), mode=0o644)
        return cls(folder=folder, signer=certificate, key=key, trusted=(certificate,))

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the authority of a directory. Raises InvalidArgument."""
        try:
            trusted = tuple(x509.load_pem_x509_certificates(_read(folder / CA_CERT)))
        except ValueError:
            raise InvalidArgument(f"{folder / CA_CERT} has no PEM certificate") from None
        try:
            key = serialization.load_pem_private_key(_read(folder / CA_KEY), password=None)
        except (ValueError, TypeError):
            raise InvalidArgument(f"{folder / CA_KEY} has no PEM key without password") from None
        signers = [one for one in trusted if one.public_key() == key.public_key()]
        if not signers or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidArgument(f"{folder / CA_KEY} is the key of no certificate in {CA_CERT}")
        return cls(folder=folder, signer=signers[0], key=key, trusted=trusted)

    def issue(
        self, names: Sequence[str], out: Path, *, days: int, common_name: str, replace: bool
    ) -> x509.Certificate:
        """Write certificate, key and trusted CAs of a host to `out`. Raises InvalidArgument."""
        alternatives = [_alternative(name) for name in names]
        if not 1 <= len(common_name) <= 64:
            raise InvalidArgument("the common name has 1 to 64 characters: set --common-name")
        if is_user_name(common_name):
            raise InvalidArgument(
                f"the common name {common_name} is that of a user in etcd, which would need no "
                "password: set another --common-name"
            )
        ends = min(datetime.now(UTC) + timedelta(days=days), self.signer.not_valid_after_utc)
        if ends <= datetime.now(UTC):
            raise FailedPrecondition(f"the CA of {self.folder} has expired: `forge certs rotate`")
        for name in (HOST_CERT, HOST_KEY, HOST_CA):
            if (out / name).exists() and not replace:
                raise InvalidArgument(f"{out / name} exists: use --replace, or another --out")
        key = ec.generate_private_key(ec.SECP256R1())
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(common_name), self.signer.subject, key, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        _make_folder(out)
        _write(out / HOST_CA, self._bundle(), mode=0o644)
        _write(out / HOST_KEY, _key_pem(key), mode=0o600)
        _write(out / HOST_CERT, _pem(certificate), mode=0o644)
        return certificate

    def rotate(self, *, days: int) -> None:
        """Add a new CA, which signs from now on; the old one stays trusted."""
        if len(self.trusted) > 1:
            raise FailedPrecondition(
                f"{self.folder} is in a rotation: issue all host certificates again, then "
                "`forge certs rotate --finish`"
            )
        certificate, key = _make_ca(days)
        # The certificate first: after a crash in between the old key still has its certificate.
        _write(self.folder / CA_CERT, _pem(certificate) + self._bundle(), mode=0o644)
        _write(self.folder / CA_KEY, _key_pem(key), mode=0o600)

    def finish_rotation(self) -> None:
        """Trust the signing CA alone."""
        if len(self.trusted) == 1:
            raise FailedPrecondition(f"{self.folder} is in no rotation: it has one CA")
        _write(self.folder / CA_CERT, _pem(self.signer), mode=0o644)

    def _bundle(self) -> bytes:
        return b"".join(_pem(one) for one in self.trusted)


def _make_ca(days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: two CAs of a rotation stay distinct.
    name = _name(f"Forge CA {secrets.token_hex(4)}")
    certificate = (
        _builder(name, name, key, datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_TOLERANCE)
        .not_valid_after(ends)
        .add_extension(subject_key, critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    """Return a DNS name or an IP address. Raises InvalidArgument."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    # Digits alone at the end: a wrong IP address.
    if len(name) > 253 or labels[-1].isdigit() or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidArgument(f"{name!r} is neither a DNS name nor an IP address")
    return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{path}: {error.strerror}; name a directory of `forge certs init`"
        ) from None


def _write(path: Path, pem: bytes, *, mode: int) -> None:
    """Write a file at once; a replaced file keeps its owner, group and mode."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_private_file(unfinished, pem.decode())
        if path.exists():
            replaced = path.stat()
            mode = replaced.st_mode & 0o777
            os.chown(unfinished, replaced.st_uid, replaced.st_gid)
        unfinished.chmod(mode)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidArgument(f"{path}: {error.strerror}") from None
