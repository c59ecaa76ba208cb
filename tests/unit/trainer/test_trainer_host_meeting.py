"""How hosts of a changing number meet: in a directory, and without those that have ended."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from services.trainer.host_meeting import (
    NAME,
    HostMeeting,
    MeetingFile,
    _place,
    make_meeting,
    use_meeting,
)


@pytest.fixture(autouse=True)
def _separate_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `services.trainer.torchrun` sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def parameters(endpoint: str, *, address: str = "", fewest: int = 1) -> RendezvousParameters:
    options = {"last_call_timeout": 1, "keep_alive_interval": 1}
    return RendezvousParameters(
        NAME, endpoint, "run", min_nodes=fewest, max_nodes=3, local_addr=address or None, **options
    )


def joined(*meetings: HostMeeting) -> list[tuple[int, int]]:
    """Rank and number of hosts of each host that joins, at the same time."""
    with ThreadPoolExecutor(len(meetings)) as threads:
        found: list[Future[RendezvousInfo]] = [
            threads.submit(one.next_rendezvous) for one in meetings
        ]
        return [(one.result().rank, one.result().world_size) for one in found]


def hosts(folder: Path, *numbers: int, fewest: int = 1) -> list[HostMeeting]:
    endpoint = str(folder / "meeting")
    return [make_meeting(parameters(endpoint, address=f"host-{n}", fewest=fewest)) for n in numbers]


def test_hosts_meet_in_a_directory_without_the_one_that_had_rank_0(tmp_path: Path) -> None:
    """The host whose name sorts first has rank 0. If it ends, the others and a new one meet."""
    first, second, third = hosts(tmp_path, 0, 1, 2, fewest=3)
    assert joined(third, second, first) == [(2, 3), (1, 3), (0, 3)]
    assert first.shutdown()
    (fourth,) = hosts(tmp_path, 3, fewest=3)
    assert joined(fourth, third, second) == [(2, 3), (1, 3), (0, 3)]
    for one in (second, third, fourth):
        assert one.shutdown()


def test_host_that_ends_lets_others_join(tmp_path: Path) -> None:
    """torch's own rendezvous is closed then, for good if a directory has its state."""
    (one,) = hosts(tmp_path, 0)
    assert joined(one) == [(0, 1)]
    assert one.shutdown() and not one.is_closed()
    (other,) = hosts(tmp_path, 1)
    assert joined(other) == [(0, 1)]
    assert other.shutdown()


def test_lost_host_is_out_of_the_meeting_after_its_last_heartbeat(tmp_path: Path) -> None:
    """A survivor that has started again meets without it, although it did not leave."""
    lost, other = hosts(tmp_path, 0, 1, fewest=2)
    assert joined(lost, other) == [(0, 2), (1, 2)]
    lost._stop_heartbeats()
    assert other.shutdown()
    (survivor,) = hosts(tmp_path, 1)
    assert joined(survivor) == [(0, 1)]
    assert survivor.shutdown()


def test_host_waits_a_minute_for_the_address_of_rank_0(tmp_path: Path) -> None:
    """Not five: its host may be lost since the meeting. `read_timeout` sets another limit, as at
    an address."""
    chosen = parameters(str(tmp_path))
    for seconds in (60, 5):
        store: Any = _place(chosen)[0]
        assert store.timeout == timedelta(seconds=seconds)
        chosen.config["read_timeout"] = 5


def test_one_of_two_changes_of_a_state_counts(tmp_path: Path) -> None:
    """The other one gets the state that counts, and its token for the next change."""
    one, other = MeetingFile(tmp_path / "hosts"), MeetingFile(tmp_path / "hosts")
    assert one.get_state() is None
    assert one.set_state(b"first") is not None
    found = other.set_state(b"second")
    assert found is not None and (found[0], found[2]) == (b"first", False)
    changed = other.set_state(b"2", found[1])
    assert changed is not None and changed[2]
    assert one.get_state() == (b"2", changed[1])
    late = one.set_state(b"late", found[1])
    assert late == (b"2", changed[1], False)


def test_state_that_was_written_in_part_is_none(tmp_path: Path) -> None:
    """Hosts then meet anew."""
    file = MeetingFile(tmp_path / "hosts")
    file.set_state(b"a state")
    (tmp_path / "hosts").write_bytes((tmp_path / "hosts").read_bytes()[:-1])
    assert file.get_state() is None
    found = file.set_state(b"another")
    assert found is not None and found[2]
    assert (tmp_path / "hosts").stat().st_mode & 0o777 == 0o600


def test_absent_directory_is_no_connection(tmp_path: Path) -> None:
    """One error, as for a store that does not answer: the supervisor tries again."""
    with pytest.raises(RendezvousConnectionError, match="absent"):
        make_meeting(parameters(str(tmp_path / "absent" / "meeting")))
    with pytest.raises(RendezvousConnectionError, match="absent"):
        MeetingFile(tmp_path / "absent" / "hosts").get_state()


def test_torchrun_finds_the_meeting_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun then waits for no other host at the end."""
    monkeypatch.setattr(SimpleElasticAgent, "_exit_barrier", SimpleElasticAgent._exit_barrier)
    use_meeting()
    use_meeting()
    made = rendezvous_handler_registry.create_handler(parameters(str(tmp_path / "meeting")))
    assert isinstance(made, HostMeeting) and made.get_backend() == NAME
