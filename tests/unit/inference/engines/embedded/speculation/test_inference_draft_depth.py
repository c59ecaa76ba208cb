"""The number of drafts: what pays by measured acceptance and time."""

from __future__ import annotations

import pytest

from services.inference.engines.embedded.speculation.depth import (
    PROBE_STEPS,
    TRIALS,
    DepthChooser,
)

MOST = 4


class World:
    """Steps whose time and acceptance are known."""

    def __init__(self, *, step_s: float, draft_s: float, accepted: float) -> None:
        """`step_s` and `draft_s` of a step on one sequence; each sequence and draft more costs
        `draft_s` for each sequence."""
        self.step_s, self.draft_s, self.accepted = step_s, draft_s, accepted
        self.chooser = DepthChooser(MOST)
        self.chosen: list[int] = []

    def run(self, steps: int, *, sequences: int = 1) -> list[int]:
        """Choose and observe; return the depths."""
        self.chosen = []
        for _ in range(steps):
            depth = self.chooser.choose(sequences, most=MOST)
            seconds = self.step_s + self.draft_s * sequences * (1 + depth)
            offered = [100 * self.accepted**head for head in range(depth)]
            self.chooser.observe(
                sequences=sequences,
                depth=depth,
                seconds=seconds,
                offered=[round(tried) for tried in offered],
                accepted=[round(tried * self.accepted) for tried in offered],
            )
            self.chosen.append(depth)
        return self.chosen

    def settled(self, **load: int) -> int:
        """The depth of most steps after trials."""
        self.run(TRIALS * (MOST + 1) + 2 * PROBE_STEPS, **load)
        chosen = self.run(PROBE_STEPS, **load)
        found = max(set(chosen), key=chosen.count)
        assert chosen.count(found) >= PROBE_STEPS - 1
        return found


def test_every_depth_is_tried_before_the_choice() -> None:
    """A few steps each, from none on."""
    world = World(step_s=1.0, draft_s=0.1, accepted=0.8)
    assert world.run(TRIALS * (MOST + 1)) == [d for d in range(MOST + 1) for _ in range(TRIALS)]


@pytest.mark.parametrize(("draft_s", "accepted", "depth"), [(0.05, 0.9, 4), (0.2, 0.6, 2)])
def test_depth_with_the_most_tokens_per_second_is_chosen(
    draft_s: float, accepted: float, depth: int
) -> None:
    """By the sum of products of acceptances over the time of a step."""
    world = World(step_s=1.0, draft_s=draft_s, accepted=accepted)
    assert world.settled() == depth
    speeds = [
        sum(accepted**n for n in range(k + 1)) / (1 + draft_s * (1 + k)) for k in range(MOST + 1)
    ]
    assert max(range(MOST + 1), key=speeds.__getitem__) == depth
    assert world.chooser.gain(1, depth) == pytest.approx(speeds[depth] / speeds[0], rel=0.05)


def test_drafts_end_where_they_do_not_pay() -> None:
    """With bad heads; and with good ones at a load where a draft costs as much as a sequence."""
    assert World(step_s=1.0, draft_s=0.2, accepted=0.05).settled() == 0
    world = World(step_s=1.0, draft_s=0.2, accepted=0.5)
    assert world.settled(sequences=1) > 0
    assert world.settled(sequences=64) == 0
    assert world.settled(sequences=1) > 0


def test_better_heads_are_noticed() -> None:
    """Steps that measure other depths find them, and drafts begin again; and the other way."""
    world = World(step_s=1.0, draft_s=0.1, accepted=0.02)
    assert world.settled() == 0
    world.accepted = 0.9
    world.run(40 * PROBE_STEPS)
    assert world.settled() == MOST
    world.accepted = 0.02
    assert world.settled() == 0


def test_one_slow_step_does_not_change_the_choice() -> None:
    """The processor may have had other work."""
    world = World(step_s=1.0, draft_s=0.1, accepted=0.8)
    depth = world.settled()
    world.chooser.observe(sequences=1, depth=depth, seconds=500.0, offered=[], accepted=[])
    assert world.run(1) in ([depth], [world.chooser._probe])


def test_fixed_depth_is_as_many_as_there_are() -> None:
    """Without any measurement; never more than heads or the bound. It is reported as the best."""
    chooser = DepthChooser(MOST, adaptive=False)
    assert [chooser.choose(9, most=heads) for heads in (0, 2, 7)] == [0, 2, MOST]
    assert [chooser.best(9, most=heads) for heads in (0, 2, 7)] == [0, 2, MOST]
