"""Several ranks behind one learner: the same training, and what becomes of it when one is gone."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from forge.core.errors import ConfigError
from forge.rl.config import MtpConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from services.trainer.actors.learner import LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner import heartbeats, rank_group, rank_processes
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.learner.rank_group import Meeting, own_store
from tests.support.rl.models import make_sample, tiny_model
from tests.support.rl.short_memory import memory_for
from tests.support.runtime.fork_server import TORCH_MODELS
from tests.support.trainer.learners import started_learner

pytestmark = pytest.mark.matrix

NAMESPACES = ("unshare", "--user", "--map-root-user", "--uts", "--mount", "--net", "sh", "-c")
LISTENERS = """
import os, sys, psutil
from pathlib import Path
from services.trainer.config import TrainerConfig
from services.trainer.learner.rank_group import join
join(Path(sys.argv[1]), TrainerConfig(), rank=0)
found = psutil.Process().net_connections()
print([each.laddr.ip for each in found if each.status == "LISTEN"])
print(os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def learner(model_path: Path, checkpoints: Path, **settings: Any) -> LearnerActor:
    settings = {
        "optimizer": OptimizerConfig(learning_rate=1e-3),
        "mtp": MtpConfig(heads=1),
        "token_budget_floor": 16,
        **settings,
    }
    return started_learner(model_path, checkpoints, **settings)


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Forks ranks from a process that has imported torch; `test_trainer_run.py` spawns them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_processes.__name__, *TORCH_MODELS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: context)
        yield


@pytest.fixture
def pair(model_path: Path, tmp_path: Path) -> Iterator[LearnerActor]:
    """Two ranks. Of one test alone: a process has one group, which other tests here end."""
    actor = learner(model_path, tmp_path / "pair", ranks=2)
    yield actor
    actor.stopped()


def step(actor: LearnerActor, seed: int) -> StepResult:
    rng = Random(seed)
    prompt = [rng.randrange(13) for _ in range(12)]
    samples = [
        make_sample([*prompt, *[rng.randrange(13) for _ in range(n + 3)]], (12, n + 15), rng=rng)
        for n in range(4)
    ]
    result: StepResult = actor.receive(
        Take(plan=plan_batch(samples, token_budget=16384, channels=32), weight_version=1)
    )
    assert result.skipped == ""
    return result


def weights(actor: LearnerActor) -> dict[str, torch.Tensor]:
    return {
        one.name: torch.frombuffer(bytearray(one.data), dtype=torch.float32)
        for one in actor.receive(TakeSnapshot(step=1)).tensors
    }


def test_model_without_rank_support_is_refused(tmp_path: Path) -> None:
    """The line has the setting, the model and the reason, and no process is left."""
    tiny_model("llama4", torch.float32).save_pretrained(tmp_path / "model")
    config = TrainerConfig(model_path=str(tmp_path / "model"), torch_threads=1, ranks=2)
    actor = LearnerActor(config, CheckpointStore(tmp_path / "checkpoints"))
    with pytest.raises(
        ConfigError, match=r"mesh.cp = 2 is not allowed for Llama4.*sequence by sequence"
    ):
        actor.started()
    assert actor._ranks is not None
    assert not any(process.is_alive() for process in actor._ranks._processes)


def ends(*_: object) -> None:
    """A rank's life, short."""
    os._exit(3)


def test_rank_that_ends_at_start_fails_the_start(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rank and its exit code, and the start can be repeated."""
    config = TrainerConfig(model_path=str(model_path), torch_threads=1, ranks=2)
    with monkeypatch.context() as patch:
        patch.setattr(rank_processes, "_follow_here", ends)
        with pytest.raises(RuntimeError, match="rank 1 ended with exit code 3"):
            rank_processes.Ranks(config)
    rank_processes.Ranks(config).close()


@pytest.mark.skipif(
    subprocess.run([*NAMESPACES, ":"], capture_output=True).returncode != 0,
    reason="unshare is not permitted here",
)
def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    """They accept any connection, and gloo would listen on the address of the host's name. Other
    parts of the process keep the interface of its environment."""
    hosts = tmp_path / "hosts"
    hosts.write_text("192.0.2.7 far\n127.0.0.1 localhost\n")
    network = "ip link set lo up && ip address add 192.0.2.7/24 dev lo && hostname far"
    script = f'{network} && mount --bind {hosts} /etc/hosts && exec "$0" -c "$1" "$2"'
    listeners = subprocess.run(
        [*NAMESPACES, script, sys.executable, LISTENERS, str(tmp_path / "meeting")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth7"},
    )
    assert listeners.stdout == "['127.0.0.1']\neth7\n"


def test_restarted_ranks_ignore_the_store_of_those_before() -> None:
    """torchrun keeps its store: addresses of an earlier start must not be found in it."""
    kept = HashStore()

    def join(rank: int) -> Store:
        return own_store(kept, Meeting(rank=rank, limit_s=math.inf), ranks=3)

    for start in range(3):
        with ThreadPoolExecutor(3) as threads:
            stores = list(threads.map(join, (2, 0, 1)))
        assert not any(one.check(["address"]) for one in stores), start
        stores[0].set("address", f"of start {start}")
        assert {one.get("address") for one in stores} == {f"of start {start}".encode()}


def test_rank_without_the_others_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line names the rank that is missing. A group that has formed in time stays."""
    ended: Queue[str] = Queue()
    monkeypatch.setattr(rank_group, "end_rank", lambda reason, **_: ended.put(reason))
    kept = HashStore()

    def join(rank: int, limit_s: float) -> None:
        meeting = Meeting(rank=rank, limit_s=limit_s)
        with meeting.limited():
            own_store(kept, meeting, ranks=2)

    for late, limits_s in (("rank 1", (0.01, 60.0)), ("rank 0", (60.0, 0.01))):
        early = 0 if late == "rank 1" else 1
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(join, early, limits_s[early])
            said = ended.get()
            join(1 - early, limits_s[1 - early])
            joined.result()
        assert said == f"the ranks did not meet within 0.01 s: missing: {late}"
    assert ended.empty()


def test_failed_rank_is_named_with_its_error(model_path: Path, tmp_path: Path) -> None:
    """Not the closed connection that the others find: that is reported as a consequence. A custom
    loss that fails remains a wrong setting."""
    log = tmp_path / "log"
    failing = ObjectiveConfig(algorithm="tests.support.trainer.failing_loss:on_rank_1")
    actor = learner(model_path, tmp_path, ranks=3, objective=failing, log_file=str(log))
    said = f"rank 1 failed: ConfigError: objective.algorithm = '{failing.algorithm}' failed: "
    said += "LookupError: no such loss here (failing_loss.py:14)"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        step(actor, 0)
    assert actor._ranks is not None
    for process in actor._ranks._processes:
        process.join(30)
    actor.stopped()
    told = {one["rank"]: one for one in map(json.loads, log.read_text().splitlines())}
    assert told[1]["event"] == "rank_failed"
    assert told[2]["event"] == "rank_ended" and told[2]["reason"] == said


def test_out_of_memory_on_one_rank_cuts_the_batch_on_both(
    pair: LearnerActor, model_path: Path, tmp_path: Path
) -> None:
    """The step is taken in smaller trees, and so is the next one; no rank waits forever."""
    alone = learner(model_path, tmp_path)
    with memory_for(pair._replica._learner, 11, backward=True):
        one, two = step(alone, 5), step(pair, 5)
    assert two.memory_retries > 0 and len(two.plan.trees) > len(one.plan.trees)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    one, two = step(alone, 6), step(pair, 6)
    assert two.memory_retries == 0 and len(two.plan.trees) > len(one.plan.trees)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    expected, found = weights(alone), weights(pair)
    assert all(torch.allclose(found[n], expected[n], atol=1e-5) for n in expected)


def test_two_ranks_train_as_one_rank_does(
    pair: LearnerActor, model_path: Path, tmp_path: Path
) -> None:
    """Losses and weights over some steps, a checkpoint in between and a restore from it."""
    alone = learner(model_path, tmp_path)
    for seed in range(3):
        one, two = step(alone, seed), step(pair, seed)
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.mtp.losses == pytest.approx(one.mtp.losses, rel=1e-4)
        if seed == 0:
            for actor in (alone, pair):
                actor._checkpoints.save(
                    actor.receive(Capture()).write,
                    step=1,
                    weight_version=2,
                    history=CheckpointHistory(),
                )
    for actor in (alone, pair):
        assert actor.receive(Restore()).step == 1
    one, two = step(alone, 7), step(pair, 7)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    expected, found = weights(alone), weights(pair)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[n], expected[n], atol=1e-5) for n in expected)


def test_lost_rank_ends_the_step_not_the_run(pair: LearnerActor) -> None:
    """The actor crashes instead of waiting; its restart starts new ranks."""
    assert pair._ranks is not None
    (process,) = pair._ranks._processes
    assert process.pid is not None
    for polite in (signal.SIGTERM, signal.SIGINT):  # as a supervisor stops a whole service
        os.kill(process.pid, polite)
    step(pair, 0)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    with pytest.raises(rank_processes.RankGone, match="rank 1 failed: killed by SIGKILL"):
        for seed in range(2):
            step(pair, seed)
    pair.stopped()
    pair.started()
    pair.receive(Restore())
    step(pair, 1)


def test_frozen_rank_ends_the_step_not_the_run(
    pair: LearnerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP closes no connection: the silent rank is killed, and the actor crashes as for a dead
    one."""
    assert pair._ranks is not None
    (process,) = pair._ranks._processes
    assert process.pid is not None
    step(pair, 0)
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(heartbeats, "LOST_S", 0.1)
    with pytest.raises(rank_processes.RankGone, match="rank 1 failed: it sent no heartbeat"):
        for seed in range(2):
            step(pair, seed)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
