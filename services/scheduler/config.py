"""Settings of the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.core.queue.admission import GenerationLimit, Mode, PartialGroups, QueueSettings
from forge.core.tasks import template_kwargs
from forge.core.tasks.validation import MAX_GROUP_SIZE
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.agreed import agreed_settings

_BOUNDS = frozenset({"max_staleness_p99", "max_shift_kl"})
IGNORED: Mapping[Mode, frozenset[str]] = {
    Mode.FIFO: _BOUNDS | {"window", "domain_shares"},
    Mode.GREEDY: _BOUNDS | {"window"},
    Mode.WINDOWED: _BOUNDS,
    Mode.ADAPTIVE: frozenset({"window", "admission", "ahead", "domain_shares"}),
}
"""By mode: settings of the queue that have no effect."""

SamplingPolicy = Literal["agent", "bound", "override"]

_AGREED = (
    "domain_chat_template_kwargs",
    "domain_context_tokens",
    "domain_sampling",
    "skip_equal_rewards",
    "session_ttl_s",
    "max_queued_groups",
    "max_group_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The windowed FIFO over groups: one leader serves, other instances are standbys."""

    queue: QueueSettings = field(default_factory=QueueSettings)
    domain_context_tokens: Mapping[str, Annotated[int, Meta(ge=1)]] = field(default_factory=dict)
    """Longest context of a domain's sessions, prompt and answer, if it is shorter than the model's;
    the gateway enforces it."""
    domain_chat_template_kwargs: Mapping[str, str] = field(default_factory=dict)
    """Variables of the model's chat template for a domain's sessions, each a JSON object, e.g.
    {"enable_thinking": false}; a task and a request may set others."""
    domain_sampling: Mapping[str, SamplingPolicy] = field(default_factory=dict)
    """Sampling parameters in training rollouts of a domain: agent (as the agent asks), bound
    (within the gateway's bounds) or override (temperature 1, no cut). A task may name another;
    domains without an entry: override."""
    skip_equal_rewards: bool = False
    """Tombstone a training group whose rollouts all have the same outcome; process rewards and
    speeds do not count."""
    takeover_hold_s: Annotated[float, Meta(ge=0)] = 2.0
    """Time for which a new leader hands out no rollout, so that runners can renew their leases
    first."""
    stall_after_s: Annotated[float, Meta(ge=1)] = 120.0
    """Time without a trained group after which the status and the log name the cause and its
    remedy."""
    session_ttl_s: Annotated[float, Meta(ge=1)] = 10_800.0
    """Validity of a session token."""
    max_queued_groups: Annotated[int, Meta(ge=1)] = 1_000_000
    """Most pending groups; further submissions are refused."""
    held_settled_groups: Annotated[int, Meta(ge=1)] = 16_384
    """Most trained groups in memory, the newest ones; the same number of tombstoned or evaluated
    ones. Each of the two sets takes about 15 MB with eight rollouts per group. A rewind to older
    groups reads the pool."""
    max_group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)] = 1024
    """Most rollouts of one task; the upper bound is what one message holds."""
    max_wait_s: Annotated[float, Meta(ge=0, le=600)] = 30.0
    """Longest wait of a call for rollouts or a batch."""
    pool_timeout_s: Annotated[float, Meta(ge=0.1)] = 5.0
    """Deadline of one attempt of a call to a pool shard."""
    shard_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Longest wait of a new leader for an unreachable pool shard; then it begins without it."""

    @classmethod
    def removed(cls) -> Mapping[str, str]:
        """A lost shard is declared so by a command."""
        command = "run `forge pool declare-lost SHARD` for a shard that is lost for good"
        return {"lost_shards": command}

    def agreed(self) -> Mapping[str, str]:
        """Returns the settings that all instances must share: a standby continues the queue."""
        return agreed_settings("scheduler", self, "queue", *_AGREED)

    def validate(self) -> None:
        """Raises `InvalidArgument` for settings without effect and for a short token validity."""
        self._refuse_ignored()
        for domain, kwargs in self.domain_chat_template_kwargs.items():
            template_kwargs.checked(kwargs, field=f"domain_chat_template_kwargs.{domain}")
        if self.session_ttl_s < self.queue.rollout_timeout_s:
            raise InvalidArgument(
                f"session_ttl_s = {self.session_ttl_s:g} must be at least queue.rollout_timeout_s "
                f"= {self.queue.rollout_timeout_s:g}: the session token would expire before the "
                "rollout ends"
            )

    def _refuse_ignored(self) -> None:
        """A changed setting without effect is an error."""
        queue = self.queue
        ignored = dict.fromkeys(IGNORED[queue.mode], f"queue.mode = {queue.mode.value}")
        if queue.admission is not GenerationLimit.AHEAD:
            ignored.setdefault("ahead", f"queue.admission = {queue.admission.value}")
        if queue.partial_groups is not PartialGroups.FILL:
            ignored["max_attempts"] = f"queue.partial_groups = {queue.partial_groups.value}"
        if queue.partial_groups is PartialGroups.WAIT:
            ignored["max_losses"] = f"queue.partial_groups = {queue.partial_groups.value}"
        default = QueueSettings()
        for name in (known.name for known in dataclasses.fields(queue) if known.name in ignored):
            value = getattr(queue, name)
            if value != getattr(default, name):
                shown = value.value if isinstance(value, GenerationLimit) else value
                raise InvalidArgument(
                    f"queue.{name} = {shown!r} has no effect with {ignored[name]}: leave it out"
                )
