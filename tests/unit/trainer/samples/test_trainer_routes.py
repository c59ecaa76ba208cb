"""Recorded experts of turns become those of their sequences."""

from __future__ import annotations

import pytest

from forge.core.routes import RouteSpan
from forge.v1 import common_pb2 as pb
from services.trainer.samples.routes import routes_of


def turn(index: int, parent: int, prefix: int, *, first: int, rows: range) -> pb.Turn:
    """A turn whose token at `first` and after has the experts `rows`."""
    return pb.Turn(
        turn_index=index,
        parent_turn=parent,
        prefix_tokens=prefix,
        sampled=pb.SampledTokens(
            routed_experts=pb.RoutedExperts(
                ids=bytes(rows), layers=1, top_k=1, id_bytes=1, first_token=first
            )
        ),
    )


def experts(spans: tuple[RouteSpan, ...]) -> dict[int, int]:
    """The expert of each token that has one."""
    return {
        span.start + place: span.routes.ids[span.first_row + place]
        for span in spans
        for place in range(span.tokens)
    }


def test_token_has_the_experts_of_the_turn_that_computed_it_first() -> None:
    """A turn has its own rows and those of its parents; a parent's last token has those of the
    first turn that continues there; a branch has its parent's before the branch."""
    turns = [
        turn(0, -1, 0, first=0, rows=range(5)),  # six tokens, the last without
        turn(1, 0, 6, first=5, rows=range(50, 53)),
        turn(2, 0, 6, first=5, rows=range(90, 94)),  # a sibling, with another row of token 5
        turn(3, 1, 3, first=2, rows=range(70, 74)),  # a branch, whose first row its parent has
    ]
    found = [experts(one) for one in routes_of(turns, [6, 9, 10, 7])]
    assert found[0] == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 50}
    assert found[1] == {**found[0], 6: 51, 7: 52}
    assert found[2] == {**found[0], 6: 91, 7: 92, 8: 93}
    assert found[3] == {0: 0, 1: 1, 2: 2, 3: 71, 4: 72, 5: 73}


def test_turns_without_a_record_leave_gaps() -> None:
    """A turn of an earlier release, and a malformed record, have no experts; later turns do."""
    broken = turn(1, 0, 4, first=3, rows=range(3))
    broken.sampled.routed_experts.layers = 2
    turns = [pb.Turn(turn_index=0, parent_turn=-1), broken, turn(2, 1, 8, first=7, rows=range(3))]
    found = [experts(one) for one in routes_of(turns, [4, 8, 11])]
    assert found[0] == {}
    assert found[1] == {7: 0}
    assert found[2] == {7: 0, 8: 1, 9: 2}


@pytest.mark.parametrize("rows", [0, 20])
def test_rows_beyond_the_sequence_are_left_out(rows: int) -> None:
    """None has a place behind the last token."""
    (found,) = routes_of([turn(0, -1, 0, first=0, rows=range(rows))], [6])
    assert set(experts(found)) == set(range(min(rows, 6)))
