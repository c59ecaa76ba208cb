"""What `forge weights` shows and means without a version."""

from __future__ import annotations

import re

import pytest

from forge.cli.command_exit import console
from forge.cli.weights import hold_line, print_listing
from forge.client.weights import earlier_version, lagging, newest_version
from forge.core.errors import FailedPrecondition
from forge.v1 import trainer_pb2 as pb


def listing(*versions: int, hold: pb.WeightsHold | None = None) -> pb.ListWeightsResponse:
    held = [
        pb.PublishedWeights(weight_version=version, step=version - 1, digest=f"{version}" * 64)
        for version in versions
    ]
    return pb.ListWeightsResponse(versions=held, hold=hold)


@pytest.mark.parametrize(
    ("hold", "version"),
    [
        (pb.WeightsHold(), 7),
        (pb.WeightsHold(base_version=7), 4),
        (pb.WeightsHold(base_version=7, canary_version=8), 7),
    ],
)
def test_rollback_without_a_version_means_the_one_before(
    hold: pb.WeightsHold, version: int
) -> None:
    """Before the served one; in a canary its base."""
    assert earlier_version(listing(4, 7, 8, hold=hold)) == version


def test_rollback_without_an_earlier_version_is_refused() -> None:
    """The message names what is held, and the setting."""
    with pytest.raises(FailedPrecondition, match=r"before 4 is held; held: \[4\].*kept_versions"):
        earlier_version(listing(4))
    with pytest.raises(FailedPrecondition, match="no weights yet"):
        newest_version(listing())
    assert newest_version(listing(4, 7)) == 7


def test_listing_shows_versions_workers_and_hold() -> None:
    """A worker that lags says why, and counts as lagging."""
    hold = pb.WeightsHold(
        base_version=4, canary_version=7, canary_workers=["d1"], subject="ann@host", since_unix_s=1
    )
    shown = listing(4, 7, hold=hold)
    shown.workers.add(instance_id="d0", role="decode", weight_version=4, wanted_version=4)
    shown.workers.add(
        instance_id="d1", role="both", weight_version=4, wanted_version=7, error="no source"
    )
    with console.capture() as captured:
        print_listing(shown)
    text = captured.get()
    for line in ("v4 .* 2 of 2 workers .*held", "v7 .* 0 of 2 workers .*canary"):
        assert re.search(line, text)
    assert "both d1: v4 (no source)" in text
    assert "canary: d1 serve v7, the others v4, by ann@host, since 1970-01-01" in text
    assert [one.instance_id for one in lagging(shown)] == ["d1"]
    assert hold_line(pb.WeightsHold()) == "no hold: workers follow the newest version"
    assert hold_line(pb.WeightsHold(base_version=4)).startswith("hold: all workers serve v4, by")
