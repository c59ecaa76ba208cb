"""Share of a step that training spends on publication, waited for or beside the next step."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from array import array
from pathlib import Path

from transformers import AutoConfig

from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import BatchPlan, plan_batch
from forge.rl.model.capabilities import attention_channels
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.coordination import Coordinator
from services.trainer.actors.learner import LearnerActor, TakeSnapshot
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Take
from services.trainer.published.publisher import Publisher
from services.trainer.published.versions import PublishedVersions

_SAMPLES = 4
_PROMPT_TOKENS = 64
_ANSWER_TOKENS = 32
_UNBOUNDED_S = 3600.0


async def publication_share(
    folder: Path, etcd: str, model: Path, *, steps: int
) -> dict[str, float]:
    """Return the share of a step that training waits for publication: for all of it, and for the
    copy alone with the rest beside the next step. Learner, publisher and etcd are real; the two
    ways alternate, step by step."""
    config = TrainerConfig(model_path=str(model), publish_dtype="bfloat16")
    actors = ActorSystem("benchmark")
    coordinator = await Coordinator.connect(etcd, cluster="publication")
    store = CheckpointStore(folder / "checkpoints", CheckpointRetention(last=1, every_steps=0))
    try:
        learner = await actors.spawn(lambda: LearnerActor(config, store), name="learner")
        publisher = Publisher(coordinator, PublishedVersions(kept=2), source="here", floor=0)
        plan = _plan(model)
        found = [
            await _two_steps(learner, publisher, plan, number=number) for number in range(steps + 1)
        ][1:]
    finally:
        await actors.stop()
        await coordinator.close()
    waited, beside, copied_s, rest_s = zip(*found, strict=True)
    return {
        "publication.share_waited": statistics.median(waited),
        "publication.share_beside": statistics.median(beside),
        "publication.copy_ms": statistics.median(copied_s) * 1e3,
        "publication.rest_ms": statistics.median(rest_s) * 1e3,
    }


async def _two_steps(
    learner: ActorRef, publisher: Publisher, plan: BatchPlan, *, number: int
) -> tuple[float, float, float, float]:
    """One step whose publication is waited for, then one with a publication beside it; the shares
    of the time of each, and the seconds of the copy and of the rest."""

    async def step() -> None:
        await learner.ask(Take(plan=plan, weight_version=1), timeout_s=_UNBOUNDED_S)

    began_s = time.monotonic()
    await step()
    stepped_s = time.monotonic()
    snapshot = await learner.ask(TakeSnapshot(step=number), timeout_s=_UNBOUNDED_S)
    copied_s = time.monotonic()
    await publisher.publish(snapshot)
    waited_s = time.monotonic()
    snapshot = await learner.ask(TakeSnapshot(step=number), timeout_s=_UNBOUNDED_S)
    copy_s = time.monotonic() - waited_s
    publication = asyncio.create_task(publisher.publish(snapshot))
    await step()
    done_s = time.monotonic()
    await publication
    late_s = time.monotonic() - done_s
    whole_s = done_s - waited_s + late_s
    return (
        (waited_s - stepped_s) / (waited_s - began_s),
        (copy_s + late_s) / whole_s,
        copied_s - stepped_s,
        waited_s - copied_s,
    )


def _plan(model: Path) -> BatchPlan:
    """A group of answers to one prompt, of random tokens."""
    config = AutoConfig.from_pretrained(model)
    rng = random.Random(0)
    prompt = rng.choices(range(config.vocab_size), k=_PROMPT_TOKENS)
    samples = [
        Sample(
            ids=array(
                "i", prompt + rng.choices(range(config.vocab_size), k=_ANSWER_TOKENS)
            ).tobytes(),
            trained=((_PROMPT_TOKENS, _PROMPT_TOKENS + _ANSWER_TOKENS),),
            behavior_logprobs=array("f", [-1.0] * _ANSWER_TOKENS).tobytes(),
            weight_versions=array("i", [1] * _ANSWER_TOKENS).tobytes(),
            advantages=array("f", [rng.gauss(0, 1)] * _ANSWER_TOKENS).tobytes(),
        )
        for _ in range(_SAMPLES)
    ]
    return plan_batch(samples, token_budget=16384, channels=attention_channels(config))
