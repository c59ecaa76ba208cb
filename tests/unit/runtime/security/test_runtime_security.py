"""Tokens that cannot be forged, keys that can be rotated, TCP that stays at home."""

from __future__ import annotations

import base64
import dataclasses
import os
import stat
import time
from pathlib import Path
from socket import gethostname

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tls import is_loopback
from forge.runtime.security.tokens import Claims, Keyring, narrow, sign_text
from forge.runtime.settings import ServiceConfig

KEY = b"k" * 32
SESSION = Claims(
    subject="runner-1",
    scopes=frozenset({"session"}),
    trajectory_id="t:0:0",
    task_id="t",
    domain="code",
    pool_shard="shard-a",
    expires_unix_s=1000.0,
)


def test_verified_token_returns_its_signed_claims() -> None:
    """Every claim comes back as it was."""
    keyring = Keyring.from_bytes(KEY)
    assert keyring.verify(keyring.sign(SESSION), now_s=999.0) == SESSION


def test_expired_token_is_refused_although_it_was_verified_before() -> None:
    """The cache of verified tokens does not outlive their expiry."""
    keyring = Keyring.from_bytes(KEY)
    token = keyring.sign(SESSION)
    keyring.verify(token, now_s=999.0)
    with pytest.raises(Unauthenticated, match="runner-1 has expired at 1970-01-01T00:16:40Z"):
        keyring.verify(token, now_s=1000.0)


def test_expired_token_is_tolerated_within_the_clock_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a day by default; the later refusal names the clock and the way out."""
    keyring = Keyring.from_bytes(KEY)
    token = keyring.sign(SESSION)
    tolerant, strict = Security(keyring), Security(keyring, clock_tolerance_s=0.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + 7200.0)
    assert tolerant.verify(token) == SESSION
    with pytest.raises(
        Unauthenticated, match=f"the clock of {gethostname()} shows 1970-01-01T02:16:40Z"
    ):
        strict.verify(token)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + 86_400.0)
    with pytest.raises(Unauthenticated, match="86400 s are tolerated; `forge doctor` compares"):
        tolerant.verify(token)


def test_service_token_is_renewed_after_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its age follows the monotonic clock: a token minted a year ahead is not kept for a year."""
    now_s = time.monotonic()
    security = Security(Keyring.from_bytes(KEY), subject="pool-0")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    ahead = security.token_for("PoolService")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 3600.0)
    renewed = security.keyring.verify(security.token_for("PoolService"), now_s=0)
    assert renewed.expires_unix_s == 2e9 + 3600.0
    assert security.token_for("PoolService") != ahead


def test_token_of_another_cluster_is_refused() -> None:
    """Only a holder of the key can sign."""
    token = Keyring.from_bytes(b"x" * 32).sign(SESSION)
    with pytest.raises(Unauthenticated, match="not signed by this cluster's key"):
        Keyring.from_bytes(KEY).verify(token, now_s=0)


@given(st.data())
def test_changed_token_is_refused(data: st.DataObject) -> None:
    """For a change of any character: only the signed claims are accepted."""
    keyring = Keyring.from_bytes(KEY)
    token = keyring.sign(SESSION)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126))
    changed = token[:at] + other + token[at + 1 :]
    try:
        claims = keyring.verify(changed, now_s=0)
    except Unauthenticated:
        return
    # base64 has spare bits in its last character: another spelling of the same mac.
    assert claims == SESSION


@given(st.text(max_size=60))
def test_garbage_raises_only_unauthenticated(token: str) -> None:
    """For any input."""
    with pytest.raises(Unauthenticated):
        Keyring.from_bytes(KEY).verify(token, now_s=0)


def test_rotated_key_verifies_tokens_of_the_old_key() -> None:
    """The first key signs, all verify: a rotation ends no token."""
    old, new = Keyring.from_bytes(KEY), Keyring.from_bytes(b"n" * 32, KEY)
    assert new.verify(old.sign(SESSION), now_s=0) == SESSION
    with pytest.raises(Unauthenticated):
        old.verify(new.sign(SESSION), now_s=0)


def test_generated_key_is_for_its_owner_alone_and_is_not_replaced(tmp_path: Path) -> None:
    """A second call keeps the first key: its tokens stay valid."""
    path = tmp_path / "key"
    first = Keyring.generate(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keyring.generate(path).verify(first.sign(SESSION), now_s=0) == SESSION


def test_key_file_open_to_everybody_is_refused(tmp_path: Path) -> None:
    """The error says how to restrict it."""
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to every user: chmod o= "):
        Keyring.from_file(path)


@pytest.mark.parametrize(("content", "message"), [(b"", "each line"), (b"short\n", "at least 32")])
def test_weak_key_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A key that could be guessed is an error at start."""
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        Keyring.from_file(path)


def test_missing_key_file_names_the_setting_and_the_file() -> None:
    """In one line."""
    with pytest.raises(ConfigError, match="key_file = '/no/such': No such file"):
        Keyring.from_file("/no/such")
    with pytest.raises(ConfigError, match="key_file is not set"):
        Security.from_config(ServiceConfig())


@pytest.mark.parametrize(
    ("held", "needed", "allowed"),
    [
        ("service", "service", True),
        ("service", "operator", True),
        ("service", "runner", True),
        ("service", "session", False),
        ("operator", "service", False),
        ("runner", "operator|runner", True),
        ("session", "operator|runner", False),
        ("session", "session", True),
        ("session", "", True),
    ],
)
def test_service_may_do_everything_except_session_calls(
    held: str, needed: str, allowed: bool
) -> None:
    """Scopes limit a caller; "" is open to everybody."""
    claims = Claims(subject="x", scopes=frozenset({held}))
    assert claims.allows(needed) is allowed


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, loopback: bool) -> None:
    """A name that may not be loopback is not."""
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.1:2379", "http://etcd.internal:2379", "127.0.0.1:2379, 10.0.0.1:2379"]
)
def test_plaintext_etcd_beyond_loopback_is_refused(endpoints: str) -> None:
    """Its directory decides where tokens go; `insecure` allows it."""
    keyring = Keyring.from_bytes(b"k" * 32)
    with pytest.raises(ConfigError, match=r"etcd = .* is plaintext .*insecure = true") as caught:
        Security(keyring).etcd_credentials(endpoints)
    assert "\n" not in str(caught.value)
    assert Security(keyring, insecure=True).etcd_credentials(endpoints) is None
    assert Security(keyring).etcd_credentials("http://127.0.0.1:1, localhost:2, [::1]:3") is None


def test_plain_tcp_beyond_loopback_is_refused_with_the_settings() -> None:
    """The error names the settings that would allow it; `insecure` allows it too."""
    keyring = Keyring.from_bytes(KEY)
    with pytest.raises(ConfigError, match=r"tls_cert, tls_key and tls_ca \(or insecure = true"):
        Security(keyring).server_credentials("0.0.0.0")
    with pytest.raises(ConfigError, match="tls_ca"):
        Security(keyring).channel_credentials("10.0.0.1:7000")
    assert Security(keyring, insecure=True).server_credentials("0.0.0.0") is None


def test_certificate_without_its_key_is_refused() -> None:
    """And a key without its certificate."""
    with pytest.raises(ConfigError, match="tls_cert and tls_key must be set together"):
        Security(Keyring.from_bytes(KEY), tls_cert="cert.pem")


def test_service_token_is_kept_until_half_its_life() -> None:
    """Signing is not paid per call."""
    security = Security(Keyring.from_bytes(KEY), subject="pool-0")
    token = security.token_for("PoolService")
    assert security.token_for("PoolService") is token
    claims = security.keyring.verify(token, now_s=0)
    assert (claims.subject, claims.scopes) == ("pool-0", frozenset({"service"}))


@pytest.mark.parametrize(
    ("held", "allowed"),
    [
        ("viewer", {"viewer"}),
        ("operator", {"viewer", "operator"}),
        ("admin", {"viewer", "operator", "admin"}),
        ("runner", {"runner"}),
        ("session", {"session"}),
    ],
)
def test_role_includes_lower_roles(held: str, allowed: set[str]) -> None:
    """viewer < operator < admin; runner and session are separate."""
    claims = Claims(subject="x", scopes=frozenset({held}))
    roles = ("viewer", "operator", "admin", "runner", "session", "service")
    assert {role for role in roles if claims.allows(role)} == allowed


def test_token_is_refused_by_other_audiences() -> None:
    """A token of an earlier release names no audience and is accepted everywhere."""
    security = Security(Keyring.from_bytes(KEY), subject="pool-0")
    token = security.token_for("PoolService")
    assert security.verify(token, "PoolService").subject == "pool-0"
    with pytest.raises(Unauthenticated, match="is for PoolService, not for TrainerService"):
        security.verify(token, "TrainerService")
    earlier = security.keyring.sign(Claims(subject="old", scopes=frozenset({"service"})))
    assert security.verify(earlier, "TrainerService").subject == "old"


def test_token_holder_can_narrow_but_not_widen_it() -> None:
    """Without the key; a narrowed token has the claims and the id of its source."""
    keyring = Keyring.from_bytes(KEY)
    claims = dataclasses.replace(SESSION, audience=frozenset({"A", "B"}), token_id="t1")
    narrowed = narrow(keyring.sign(claims), "A")
    assert keyring.verify(narrowed, now_s=0) == dataclasses.replace(
        claims, audience=frozenset({"A"})
    )
    for refused, reason in (
        (narrow(keyring.sign(claims), "C"), "not for this service"),
        (narrow(narrowed, "B"), "not one of this cluster's"),
        (narrowed.rpartition(".")[0].rpartition(".")[0] + "." + narrowed.rpartition(".")[2], "key"),
    ):
        with pytest.raises(Unauthenticated, match=reason):
            keyring.verify(refused, now_s=0)


def test_deeply_nested_narrowing_is_refused() -> None:
    """A holder writes its narrowing without the key, so it may be any text."""
    keyring = Keyring.from_bytes(KEY)
    narrowing = base64.urlsafe_b64encode(b"[" * 5001).decode()
    signed = sign_text(keyring.sign(SESSION), narrowing)
    with pytest.raises(Unauthenticated, match="malformed"):
        keyring.verify(f"{signed['signer']}.{narrowing}.{signed['signature']}", now_s=0)


def test_short_token_of_a_person_expires_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance of a day is for services, whose clocks may differ."""
    security = Security(Keyring.from_bytes(KEY))
    claims = Claims(subject="ada", scopes=frozenset({"admin"}), expires_unix_s=1000.0)
    token = security.keyring.sign(claims)
    monkeypatch.setattr(time, "time", lambda: 1299.0)
    assert security.verify(token) == claims
    monkeypatch.setattr(time, "time", lambda: 1300.0)
    with pytest.raises(Unauthenticated, match="300 s are tolerated"):
        security.verify(token)


def issued(subject: str) -> str:
    return Keyring.from_bytes(KEY).sign(Claims(subject=subject, scopes=frozenset({"runner"})))


def test_replaced_token_file_is_read_again(tmp_path: Path) -> None:
    """A runner gets its next token without a restart, also one of the same time, as a coarse clock
    or `cp -p` gives it; an unreadable file keeps the last one."""
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        Bearer(file=str(file))
    file.write_text(issued("first") + "\n")
    bearer = Bearer(file=str(file))
    assert bearer.token() == issued("first")
    file.write_text(issued("second") + "\n")
    os.utime(file, ns=(1, 1))
    assert bearer.token() == issued("second")
    next_file = tmp_path / "next"
    next_file.write_text(issued("thirds") + "\n")
    os.utime(next_file, ns=(1, 1))
    next_file.replace(file)
    assert bearer.token() == issued("thirds")
    file.unlink()
    assert bearer.token() == issued("thirds")
    with pytest.raises(ConfigError, match="`forge token issue`"):
        Bearer(text="garbage")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff", b"v1.eyJzdW", b"v1.MTI.x", b"x.eyJzdWIiOiJ4In0.x"]
)
def test_token_file_without_a_token_has_no_effect_on_a_running_process(
    tmp_path: Path, content: bytes
) -> None:
    """As wrong certificates; one line of the log names it, and a start with it is refused."""
    file = tmp_path / "token"
    file.write_text(issued("first"))
    bearer = Bearer(file=str(file))
    file.write_bytes(content)
    with capture_logs() as logs:
        assert [bearer.token() for _ in range(2)] == [issued("first")] * 2
    assert [(one["event"], one["files"]) for one in logs] == [
        ("credentials_not_reloaded", "token_file")
    ]
    with pytest.raises(ConfigError, match=f"token_file = '{file}': the token is not one"):
        Bearer(file=str(file))
    file.write_text(issued("second"))
    assert bearer.token() == issued("second")


def test_cut_token_is_refused_wherever_it_is_cut() -> None:
    """A file that is full, or read while it is written, has a part of its token."""
    keyring, token = Keyring.from_bytes(KEY), issued("first")
    for length in range(len(token)):
        with pytest.raises(ConfigError, match="`forge token issue`"):
            Bearer(text=token[:length] or ".")
        with pytest.raises(Unauthenticated):
            keyring.verify(token[:length], now_s=0)
    for cut in (token[:-2], token[:-42]):
        for use in (narrow, sign_text):
            with pytest.raises(Unauthenticated, match="malformed"):
                use(cut, "PoolService")
