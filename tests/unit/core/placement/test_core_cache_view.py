"""A router's view of a worker's cache: reports, expectations, guesses."""

from __future__ import annotations

from unittest import mock

import pytest

from forge.core.placement import chain_hashes
from forge.core.placement.cache_view import CacheView
from forge.core.placement.chain_hashes import LastTurns, PromptChains
from forge.core.placement.home_workers import Homes
from forge.core.placement.step_time import StepTime
from forge.core.token_columns import int32_bytes

PROMPT = PromptChains(int32_bytes(range(40)))
BLOCKS = PROMPT.of(8)


def view() -> CacheView:
    return CacheView(block_tokens=8, capacity_tokens=400)


def test_reported_blocks_count_up_to_the_first_missing_one() -> None:
    """A block behind a missing one is of no use."""
    cached = view()
    cached.report(stored=[*BLOCKS[:2], BLOCKS[3]], removed=(), anew=True)
    assert cached.tokens(PROMPT, now_s=0) == 16
    cached.report(stored=[BLOCKS[2]], removed=(), anew=False)
    assert cached.tokens(PROMPT, now_s=0) == 32
    cached.report(stored=(), removed=[BLOCKS[0]], anew=False)
    assert cached.tokens(PROMPT, now_s=0) == 0


def test_placed_prompt_counts_until_its_time_is_over() -> None:
    """Unless the worker reports it: then until it reports the removal."""
    cached = view()
    cached.report(stored=(), removed=(), anew=True)
    cached.expect(PROMPT, until_s=10)
    assert cached.tokens(PROMPT, now_s=9) == 40
    assert cached.tokens(PROMPT, now_s=10) == 0
    cached.expect(PROMPT, until_s=20)
    cached.report(stored=BLOCKS[:3], removed=(), anew=False)
    cached.forget_expected(now_s=30)
    assert cached.tokens(PROMPT, now_s=30) == 24


def test_report_of_everything_replaces_the_view() -> None:
    """After a gap the worker sends all it has."""
    cached = view()
    cached.report(stored=BLOCKS, removed=(), anew=True)
    cached.report(stored=BLOCKS[:1], removed=(), anew=True)
    assert cached.tokens(PROMPT, now_s=0) == 8


def test_worker_without_reports_has_what_was_sent_there() -> None:
    """Until it has new weights."""
    cached = view()
    cached.expect(PROMPT, until_s=1)
    assert cached.tokens(PROMPT, now_s=100) == 40
    cached.forget_guess()
    assert cached.tokens(PROMPT, now_s=100) == 0


def test_chain_names_all_tokens_before_its_end() -> None:
    """The same block behind another one has another name."""
    other = PromptChains(int32_bytes([*range(1, 9), *range(8, 40)]))
    assert PROMPT.ids[32:64] == other.ids[32:64]
    assert not set(BLOCKS) & set(other.of(8))


def test_session_lives_until_it_is_silent_for_long() -> None:
    """Three mean pauses between two requests; it counts on the worker of its last request. The
    second call of a request is no pause."""
    homes = Homes()
    for turn in range(10):
        worker = "w0" if turn < 9 else "w1"
        homes.settle("a", worker, now_s=2 * turn)
        homes.settle("a", worker, now_s=2 * turn + 0.5)
        homes.rest("a", now_s=2 * turn + 1)
    assert (homes.live("w0"), homes.live("w1")) == (0, 1)
    homes.expire(now_s=19 + 2.9)
    assert homes.home("a") == "w1"
    homes.expire(now_s=19 + 3.1)
    assert homes.home("a") is None
    assert homes.live("w1") == 0


def test_step_time_learns_what_a_request_adds() -> None:
    """From steps with few and many requests; before, a quarter of a step counts as theirs."""
    step = StepTime(each_s=1.0)
    assert step.each_s == 1.0
    for _ in range(20):
        step.observe(running=4, seconds=0.020)
    assert step.each_s == pytest.approx(0.005 / 4)
    for _ in range(20):
        step.observe(running=12, seconds=0.024)
    assert step.each_s == pytest.approx(0.0005, rel=0.01)


def test_step_time_of_a_request_is_never_negative() -> None:
    """Noise may show large batches as faster."""
    step = StepTime(each_s=1.0)
    for running, seconds in ((2, 0.030), (8, 0.010)) * 10:
        step.observe(running=running, seconds=seconds)
    assert 0 < step.each_s < 0.001


@pytest.mark.parametrize("known_tokens", [0, 3, 4, 17, 40])
def test_hashes_of_a_continued_prompt_are_those_of_the_whole(
    known_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known blocks are not hashed again."""
    known = PromptChains(PROMPT.ids[: 4 * known_tokens])
    known.of(4)
    chain_hash = mock.Mock(wraps=chain_hashes.chain_hash)
    monkeypatch.setattr(chain_hashes, "chain_hash", chain_hash)
    continued = PromptChains(PROMPT.ids, after=known).of(4)
    assert chain_hash.call_count == 10 - known_tokens // 4
    assert continued == PromptChains(PROMPT.ids).of(4)


def test_turn_is_hashed_from_where_it_parts_from_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a session does not go on behind its last token."""
    turns = LastTurns(most_bytes=1 << 20)
    turns.keep("s", turns.prompt(PROMPT.ids, session="s"))
    expected = PromptChains(PROMPT.ids[: 4 * 30] + PROMPT.ids).of(4)
    turns.prompt(PROMPT.ids, session="s").of(4)
    chain_hash = mock.Mock(wraps=chain_hashes.chain_hash)
    monkeypatch.setattr(chain_hashes, "chain_hash", chain_hash)
    turn = turns.prompt(PROMPT.ids[: 4 * 30] + PROMPT.ids, session="s")
    assert turn.of(4) == expected
    # The first 28 of 70 tokens are whole blocks of both.
    assert chain_hash.call_count == 17 - 7


def test_kept_turns_are_bounded() -> None:
    """The longest silent sessions are forgotten; requests without a session are not kept."""
    turns = LastTurns(most_bytes=3 * len(PROMPT.ids))
    known = []
    for session in ("", "a", "b", "c", "a", "d"):
        turns.keep(session, prompt := turns.prompt(PROMPT.ids, session=session))
        known.append(prompt)
    assert list(turns._prompts) == ["c", "a", "d"]
    assert turns._bytes == 3 * len(PROMPT.ids)
    assert all(prompt._after is None for prompt in known)
