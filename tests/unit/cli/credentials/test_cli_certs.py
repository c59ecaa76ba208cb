"""`forge certs`: files that TLS accepts, a rotation without a pause, mistakes in one line."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forge.cli.main import app


def certs(*words: str | Path) -> str:
    """The output of a command that succeeds."""
    ended = CliRunner().invoke(app, ["certs", *map(str, words)])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def issue(tmp: Path, host: str, *options: str) -> Path:
    certs("issue", host, "127.0.0.1", "--ca", tmp / "ca", "--out", tmp / host, *options)
    return tmp / host


def context(purpose: ssl.Purpose, host: Path, ca: Path) -> ssl.SSLContext:
    """Strict mutual TLS with the files of a host; `ca` is trusted."""
    made = ssl.create_default_context(purpose, cafile=str(ca))
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(host / "tls_cert.pem", host / "tls_key.pem")
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Raises SSLError where one of them refuses the other."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(ours, server_side=True).close()
        except (ssl.SSLError, OSError):
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs, server_hostname=name) as connected:
            # A server refuses a client's certificate after the client's handshake.
            connected.recv(1)
    finally:
        thread.join()


def connect(server: Path, client: Path, name: str, *, server_ca: Path, client_ca: Path) -> None:
    shake_hands(
        context(ssl.Purpose.CLIENT_AUTH, server, server_ca),
        context(ssl.Purpose.SERVER_AUTH, client, client_ca),
        name,
    )


def test_hosts_of_one_ca_trust_each_other_by_name_and_address(tmp_path: Path) -> None:
    """Each is server and client; other names and hosts of another CA are refused."""
    certs("init", tmp_path / "ca")
    pool, gateway = issue(tmp_path, "pool.example"), issue(tmp_path, "gateway.example")
    ca = pool / "tls_ca.pem"
    for name in ("pool.example", "127.0.0.1"):
        connect(pool, gateway, name, server_ca=ca, client_ca=ca)
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        connect(pool, gateway, "other.example", server_ca=ca, client_ca=ca)
    other = tmp_path / "other"
    certs("init", other / "ca")
    stranger = issue(other, "pool.example")
    with pytest.raises(ssl.SSLError):
        connect(pool, stranger, "pool.example", server_ca=ca, client_ca=ca)


def test_private_keys_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    """A certificate is public; a replaced key keeps the mode that its owner chose."""
    certs("init", tmp_path / "ca")
    host = issue(tmp_path, "pool.example")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in host.iterdir()}
    assert modes == {"tls_cert.pem": 0o644, "tls_key.pem": 0o600, "tls_ca.pem": 0o644}
    assert stat.S_IMODE((tmp_path / "ca" / "ca-key.pem").stat().st_mode) == 0o600
    (host / "tls_key.pem").chmod(0o640)
    issue(tmp_path, "pool.example", "--replace")
    assert stat.S_IMODE((host / "tls_key.pem").stat().st_mode) == 0o640


def test_rotation_keeps_every_pair_of_hosts_connected(tmp_path: Path) -> None:
    """During it old and new certificates trust each other; after it the old one is refused."""
    certs("init", tmp_path / "ca")
    old = issue(tmp_path, "old.example")
    old_ca = old / "tls_ca.pem"
    certs("rotate", tmp_path / "ca")
    new = issue(tmp_path, "new.example")
    bundle = new / "tls_ca.pem"
    connect(new, old, "new.example", server_ca=bundle, client_ca=bundle)
    connect(old, new, "old.example", server_ca=bundle, client_ca=bundle)
    with pytest.raises(ssl.SSLError):
        connect(new, old, "new.example", server_ca=bundle, client_ca=old_ca)
    certs("rotate", tmp_path / "ca", "--finish")
    final = tmp_path / "ca" / "ca.pem"
    connect(new, new, "new.example", server_ca=final, client_ca=final)
    with pytest.raises(ssl.SSLError):
        connect(new, old, "new.example", server_ca=final, client_ca=bundle)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "{ca}"), "ca.pem exists; `forge certs rotate` replaces a CA"),
        (("init", "{tmp}/file"), "{tmp}/file: File exists"),
        (("rotate", "{ca}", "--finish"), "{ca} is in no rotation: it has one CA"),
        (("rotate", "{tmp}/none"), "none/ca.pem: No such file or directory; name a directory of"),
        (("issue", "a", "--ca", "{tmp}/bad", "--out", "{tmp}/a"), "ca.pem has no PEM certificate"),
        (("issue", "a", "--ca", "{mixed}", "--out", "{tmp}/a"), "is the key of no certificate in"),
        (
            ("issue", "10.0.0.700", "--ca", "{ca}", "--out", "{tmp}/a"),
            "is neither a DNS name nor an IP",
        ),
        (("issue", "a b", "--ca", "{ca}", "--out", "{tmp}/a"), "is neither a DNS name nor an IP"),
        (("issue", "a", "--ca", "{ca}", "--out", "{tmp}/h"), "tls_cert.pem exists: use --replace"),
        (("issue", "a", "--ca", "{ca}", "--out", "{tmp}/file/a"), "Not a directory"),
    ],
)
def test_mistake_in_forge_certs_is_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """No traceback, exit code 2, and no file is written."""
    folders = {"tmp": tmp_path, "ca": tmp_path / "ca", "mixed": tmp_path / "mixed"}
    for name in ("ca", "mixed", "bad"):
        certs("init", tmp_path / name)
    (tmp_path / "mixed" / "ca.pem").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
    (tmp_path / "bad" / "ca.pem").write_text("no certificate")
    (tmp_path / "file").touch()
    certs("issue", "h", "--ca", tmp_path / "ca", "--out", tmp_path / "h")
    before = sorted(tmp_path.rglob("*"))
    ended = CliRunner().invoke(app, ["certs", *(word.format(**folders) for word in words)])
    assert ended.exit_code == 2, ended.exception
    assert ended.stderr.startswith("forge: ")
    assert ended.stderr.count("\n") == 1
    assert said.format(**folders) in ended.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["root", "default.pool", "a.b.scheduler", "default.runner@h1"])
def test_common_name_of_an_etcd_user_is_refused(tmp_path: Path, name: str) -> None:
    """etcd accepts it in place of a password. A host with that name needs another common name."""
    certs("init", tmp_path / "ca")
    where = ["--ca", str(tmp_path / "ca"), "--out", str(tmp_path / "host")]
    for words in (["h1", "--common-name", name], [name] if "@" not in name else []):
        if words:
            ended = CliRunner().invoke(app, ["certs", "issue", *words, *where])
            assert ended.exit_code == 2
    assert "would need no password" in ended.output
    assert not (tmp_path / "host").exists()
    certs("issue", "default.pool", "--common-name", "host-1", *where)
