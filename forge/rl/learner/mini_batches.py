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
    divided: list[list[Sample]] = [[] for _ in range(min(count, len(groups)))]
    totals = [0] * len(divided)
    of_domain: dict[str, list[int]] = defaultdict(lambda: [0] * len(divided))
    sizes = [(sum(one.trained_tokens for one in group), group) for group in groups.values()]
    # Largest first, and one domain after the other: what is left to even out is small.
    for size, group in sorted(sizes, key=lambda one: (one[1][0].domain, -one[0])):
        here = of_domain[group[0].domain]
        lightest = min(range(len(divided)), key=lambda place: (here[place], totals[place], place))
        divided[lightest].extend(group)
        here[lightest] += size
        totals[lightest] += size
    return divided
