"""The trainer's ranks under torchrun, as one process: what it refuses before a rank starts."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from queue import Queue

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed import run as elastic

from services.trainer.learner import heartbeats
from services.trainer.learner.heartbeats import LOST_S, Silence
from services.trainer.torchrun import main
from services.trainer.torchrun_rank import report_failure

ROOT = Path(__file__).parents[3]
ELASTIC = ("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=host-0:29400")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nnodes", "1:4"], "--nnodes 1:4 is not allowed with --rdzv-backend static"),
        (["--nnodes=1:4", "--rdzv-backend=c10d"], "1:4 is not allowed without --rdzv-endpoint"),
        (
            [*ELASTIC, "--", "--mesh.dp-shard=2", "--mesh.dp-replicate=0"],
            "--nnodes 1:4, 1 of them: mesh.dp_replicate = 0, mesh.dp_shard = 2, mesh.cp = 0, "
            "mesh.tp = 1 is not allowed with 1 ranks: the mesh has 2",
        ),
        (
            [*ELASTIC, "--", "--mesh.dp-shard=0", "--publish-from=ranks"],
            "--nnodes 1:4, 1 of them: publish_from = ranks is not allowed",
        ),
        (["--nproc-per-node", "some"], "Unsupported nproc_per_node value: some"),
        (["--", "--max-stepz=1"], "max_stepz"),
        (
            ["--nnodes=2", "--nproc-per-node=2", "--", "--mesh.dp-shard=3"],
            "is not allowed with 4 ranks: the mesh has 3",
        ),
    ],
)
def test_wrong_settings_are_refused_before_a_rank_starts(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the exit code that no supervisor retries; the mesh is that of all hosts."""
    before = dict(os.environ)
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("forge trainer: ") and said in line
    assert dict(os.environ) == before


def test_silent_rank_is_lost_after_a_limit() -> None:
    """Counted from its newest heartbeat, or from the start if it has sent none."""
    silence = Silence(2, now_s=0.0)
    for now_s, beats in ((LOST_S, [b"1", b""]), (LOST_S, [b"1", b"1"]), (2 * LOST_S, [b"1", b"2"])):
        silence.heard(beats, now_s=now_s)
        assert silence.lost(now_s=now_s) is None
    silence.heard([b"1", b"3"], now_s=2 * LOST_S + 1)
    assert silence.lost(now_s=2 * LOST_S + 1) == 0
    assert Silence(1, now_s=0.0).lost(now_s=LOST_S + 1) == 0


class Vanished(HashStore):
    """A store on a host that answers no more."""

    def set(self, key: str, value: str) -> None:
        """Wait forever."""
        del key, value
        threading.Event().wait()


@pytest.mark.parametrize("store", [HashStore(), Vanished()])
@pytest.mark.parametrize(("rank", "silent"), [(0, 1), (1, 0)])
def test_rank_ends_when_another_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, store: Store, rank: int, silent: int
) -> None:
    """Rank 0 observes all others and these observe rank 0, even if its host is gone."""
    ended: Queue[str] = Queue()
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.01)
    monkeypatch.setattr(heartbeats, "LOST_S", 0.1)
    monkeypatch.setattr(heartbeats, "end_rank", lambda reason, **_: ended.put(reason))
    beats = heartbeats.Heartbeats(store, rank=rank, ranks=2)
    assert ended.get() == f"rank {silent} sent no heartbeat for 0 s"
    beats.stop()


@pytest.mark.parametrize("stuck", [True, False])
def test_exchange_with_a_lost_child_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Only if one and the same goes on; rank 0 learns of the loss by itself in the next one."""
    happened: Queue[tuple[str, int]] = Queue()
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.01)
    monkeypatch.setattr(heartbeats, "LOST_S", 0.05)
    exchanges = iter([3, 3] if stuck else [0, 4, 0, 5, 6, 0])

    def exchange() -> int:
        number = next(exchanges, None)
        if number is None:
            happened.put(("none is stuck", 0))
            return 0
        return number

    beats = heartbeats.ChildHeartbeats(
        [tmp_path / "missing"],
        on_lost=lambda rank: happened.put(("lost", rank)),
        exchange=exchange,
        on_stuck=lambda rank: happened.put(("stuck", rank)),
    )
    assert happened.get(timeout=60) == ("lost", 1)
    assert happened.get(timeout=60) == (("stuck", 1) if stuck else ("none is stuck", 0))
    beats.stop()


def test_first_failure_of_a_rank_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones are consequences; without torchrun nothing is written."""
    report_failure("nowhere")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report_failure("the cause")
    report_failure("a consequence")
    assert json.loads(file.read_text())["message"] == "the cause"


def test_ranks_of_a_trainer_take_the_host_from_their_instance() -> None:
    """Each variable of torchrun is an option of it; those of all hosts have a documented file."""
    text = (ROOT / "deploy" / "systemd" / "forge-trainer-rank@.service").read_text()
    page = (ROOT / "docs" / "scaling.md").read_text()
    (documented,) = re.findall(r"# /etc/forge/trainer-rank.env\n(.*?)```", page, re.S)
    known = {f"PET_{name.upper()}" for name in vars(elastic.parse_args(["program"]))}
    given = {*re.findall(r"(PET_\w+)=", text), *re.findall(r"(PET_\w+)=", documented)}
    assert given <= known and "PET_NODE_RANK=%i" in text
    assert {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR"} <= given
