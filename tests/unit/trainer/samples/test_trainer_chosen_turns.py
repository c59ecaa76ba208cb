"""Which turns of a batch have their token values stored."""

from __future__ import annotations

from random import Random

from services.trainer.samples.chosen_turns import SampleSize, chosen_numbers


def batch(*lengths_of_groups: tuple[int, ...]) -> list[SampleSize]:
    """A sample for each number of trained tokens."""
    samples: list[SampleSize] = []
    for group, lengths in enumerate(lengths_of_groups):
        samples += [SampleSize(len(samples) + at, group, one) for at, one in enumerate(lengths)]
    return samples


def test_whole_turns_within_the_bound_are_chosen() -> None:
    """Of group after group, in another order each step; a turn that is too long is left out."""
    samples = batch((3, 3), (5, 1), (40,))
    seen = set()
    for step in range(40):
        chosen = chosen_numbers(samples, 7, rng=Random(step))
        assert chosen == chosen_numbers(samples, 7, rng=Random(step))
        assert sum(samples[number].trained_tokens for number in chosen) <= 7
        assert 4 not in chosen
        seen.add(chosen)
    # The group that comes first is whole; what is left goes to the next one.
    assert seen == {(0, 1, 3), (2, 3)}


def test_bound_of_a_batch_takes_all_and_none_takes_nothing() -> None:
    """Every number once."""
    samples = batch((3, 3), (5, 1))
    assert sorted(chosen_numbers(samples, 12, rng=Random(1))) == [0, 1, 2, 3]
    assert chosen_numbers(samples, 0, rng=Random(1)) == ()
