"""Divides a batch into mini-batches, each for one update of the optimizer.

Owns the division alone: groups stay whole, since their samples share prefixes and a baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from forge.core.prefix_tree import Sample


def mini_batches(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """At most `count` mini-batches with nearly equal trained tokens, in all and of each domain.

    The same samples give the same division. With fewer groups than `count` there are fewer.
    """
    groups: dict[int, list[Sample]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[-1 - index if sample.group < 0 else sample.group].append(sample)
    whole = list(groups.values())
    sizes = [(group[0].domain, sum(one.trained_tokens for one in group)) for group in whole]
    return [
        [sample for place in part for sample in whole[place]]
        for part in divide_groups(sizes, count)
    ]


def divide_groups(sizes: Sequence[tuple[str, int]], count: int) -> list[list[int]]:
    """The places of the groups of each mini-batch; `sizes` has domain and trained tokens of each
    group. As `mini_batches` divides their samples."""
    divided: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    totals = [0] * len(divided)
    of_domain: dict[str, list[int]] = defaultdict(lambda: [0] * len(divided))
    # Largest first, and one domain after the other: what is left to even out is small.
    for place in sorted(range(len(sizes)), key=lambda one: (sizes[one][0], -sizes[one][1])):
        domain, size = sizes[place]
        here = of_domain[domain]
        lightest = min(range(len(divided)), key=lambda part: (here[part], totals[part], part))
        divided[lightest].append(place)
        here[lightest] += size
        totals[lightest] += size
    return divided
