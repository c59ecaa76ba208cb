"""Epochs, shuffling and resumption of a data set."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.tasks.dataset_cursor import DatasetCursor, Place, chosen_of, place_of, task_id_of


def drain(cursor: DatasetCursor, take: int = 3) -> list[Place]:
    found: list[Place] = []
    while places := cursor.waiting(take):
        found += places
        cursor.submitted(places)
    return found


def test_each_epoch_has_its_own_order_and_a_seed_repeats_it() -> None:
    """Each row once an epoch; another seed is another order."""
    found = drain(DatasetCursor(rows=50, epochs=2, seed=1))
    first, second = found[:50], found[50:]
    assert sorted(place.row for place in first) == list(range(50))
    assert {place.epoch for place in second} == {1}
    assert [place.row for place in first] != [place.row for place in second]
    assert found == drain(DatasetCursor(rows=50, epochs=2, seed=1), take=7)
    assert found != drain(DatasetCursor(rows=50, epochs=2, seed=2))


def test_unshuffled_epochs_have_the_order_of_the_file() -> None:
    """Again in each epoch, also without an end."""
    cursor = DatasetCursor(rows=2, epochs=0, seed=0, shuffle=False)
    found: list[Any] = []
    for _ in range(5):
        places = cursor.waiting(1)
        found += places
        cursor.submitted(places)
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert not cursor.finished


@given(
    rows=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    stops=st.lists(st.integers(0, 9), max_size=6),
)
def test_interrupted_data_set_gives_each_row_once_an_epoch(
    rows: int, epochs: int, seed: int, stops: list[int]
) -> None:
    """A cursor rebuilt from the submitted tasks continues, even if a curriculum chose them in any
    order."""
    draw = Random(seed)
    done: list[Place] = []
    for stop in [*stops, rows * epochs]:
        cursor = DatasetCursor(rows=rows, epochs=epochs, seed=seed, submitted=done)
        for _ in range(stop):
            waiting = cursor.waiting(5)
            if not waiting:
                break
            picked = [draw.choice(waiting)]
            done += picked
            cursor.submitted(picked)
    assert sorted(done) == [Place(epoch, row) for epoch in range(epochs) for row in range(rows)]
    assert DatasetCursor(rows=rows, epochs=epochs, seed=seed, submitted=done).finished
    assert [place.epoch for place in done] == sorted(place.epoch for place in done)


def test_task_id_holds_the_place_in_the_data_set() -> None:
    """It is read back; a task of another data set is not mistaken."""
    place = Place(3, 17)
    assert place_of("math", task_id_of("math", place)) == place
    assert place_of("math", task_id_of("math.e1.r2", place)) is None
    assert place_of("math", "train-0000001") is None
    with pytest.raises(InvalidArgument):
        task_id_of("no spaces", place)


def test_other_file_under_the_same_name_is_refused() -> None:
    """Submitted rows are missing in it."""
    with pytest.raises(InvalidArgument, match="row 9"):
        DatasetCursor(rows=5, epochs=1, seed=0, submitted=[Place(0, 9)])
    with pytest.raises(InvalidArgument):
        DatasetCursor(rows=0, epochs=1, seed=0)


def test_curriculum_chooses_only_offered_rows() -> None:
    """Each position once; a row that does not fit now is offered again."""
    waiting = [Place(0, row) for row in (4, 5, 6)]
    assert chosen_of(waiting, [2, 0, 1], 2) == [(0, 6), (0, 4)]
    for wrong in ([3], [-1], [0, 0]):
        with pytest.raises(InvalidArgument):
            chosen_of(waiting, wrong, 2)
