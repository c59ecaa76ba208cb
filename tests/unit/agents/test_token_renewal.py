"""The renewal of a runner's token: its moment, its file, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge.agents.token_renewal import REFUSED_S, RETRY_S, TokenRenewal
from forge.core.errors import FailedPrecondition, Unavailable
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.tokens import Claims, Keyring
from forge.v1 import scheduler_pb2 as pb

KEYRING = Keyring.from_bytes(b"k" * 32)
ISSUED = Claims(
    subject="host",
    scopes=frozenset({"runner"}),
    token_id="one",
    issued_unix_s=1000.0,
    expires_unix_s=2000.0,
)


class Stop(Exception):
    """Ends the endless loop of a renewal."""


class Scheduler:
    """Renews, or fails; its clock moves by each sleep."""

    def __init__(self, *failures: Exception) -> None:
        self.now_s = ISSUED.issued_unix_s
        self.called_at_s: list[float] = []
        self.pauses_s: list[float] = []
        self._failures = list(failures)

    async def __call__(self, method: str, request: Any, *, timeout_s: float) -> Any:
        assert method == "RenewToken"
        self.called_at_s.append(self.now_s)
        if self._failures:
            raise self._failures.pop(0)
        claims = replace(ISSUED, issued_unix_s=self.now_s, expires_unix_s=self.now_s + 1000.0)
        return pb.RenewTokenResponse(token=KEYRING.sign(claims))

    async def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s
        if self.now_s > 3000.0:
            raise Stop

    async def run(self, bearer: Bearer) -> None:
        renewal = TokenRenewal(bearer, self, clock=lambda: self.now_s, sleep=self.sleep)
        with pytest.raises(Stop):
            await renewal.run()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(KEYRING.sign(ISSUED))
    return path


async def test_token_is_renewed_at_half_of_its_life(file: Path, tmp_path: Path) -> None:
    """The renewal is in the state file, for its owner alone, and used after a restart."""
    state = tmp_path / "state"
    bearer = Bearer(file=str(file), state_file=str(state))
    scheduler = Scheduler()
    await scheduler.run(bearer)
    assert scheduler.called_at_s[0] == 1500.0
    assert all(gap >= 500.0 for gap in _gaps(scheduler.called_at_s))
    assert bearer.claims.expires_unix_s > 3000.0
    assert state.stat().st_mode & 0o077 == 0
    again = Bearer(file=str(file), state_file=str(state))
    assert again.token() == bearer.token() == state.read_text().strip()
    assert file.read_text() == KEYRING.sign(ISSUED)


def _gaps(moments_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments_s)]


async def test_renewal_without_a_state_file_replaces_the_token_file(file: Path) -> None:
    """A directory that is not writable costs the renewal at the next restart, and a warning."""
    bearer = Bearer(file=str(file))
    await Scheduler().run(bearer)
    assert file.read_text().strip() == bearer.token() != KEYRING.sign(ISSUED)
    unwritable = Bearer(file=str(file), state_file="/proc/nowhere/token")
    await Scheduler().run(unwritable)
    assert unwritable.claims.expires_unix_s > 3000.0


async def test_new_token_of_the_operator_replaces_renewals(file: Path, tmp_path: Path) -> None:
    """Its id differs, so the renewals of the earlier token no longer count."""
    state = tmp_path / "state"
    bearer = Bearer(file=str(file), state_file=str(state))
    await Scheduler().run(bearer)
    other = KEYRING.sign(replace(ISSUED, token_id="two"))
    file.write_text(other)
    assert Bearer(file=str(file), state_file=str(state)).token() == other


@pytest.mark.parametrize(
    ("failure", "pause_s"),
    [(Unavailable("no leader"), RETRY_S), (FailedPrecondition("not renewable"), REFUSED_S)],
)
async def test_failed_renewal_keeps_the_token(
    file: Path, failure: Exception, pause_s: float
) -> None:
    """An outage is retried soon, a refusal seldom."""
    scheduler = Scheduler(failure)
    bearer = Bearer(file=str(file))
    await scheduler.run(bearer)
    assert pause_s in scheduler.pauses_s


async def test_token_without_an_id_is_never_renewed(tmp_path: Path) -> None:
    """Tokens of an earlier release have none."""
    file = tmp_path / "token"
    file.write_text(KEYRING.sign(replace(ISSUED, token_id="")))
    scheduler = Scheduler()
    await scheduler.run(Bearer(file=str(file)))
    assert scheduler.called_at_s == []
