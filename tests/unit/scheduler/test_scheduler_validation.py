"""Bad requests, each with a message that names field and value; and settings alike."""

from __future__ import annotations

import dataclasses
import re

import pytest

from forge.core.errors import ConfigError, InvalidArgument
from forge.core.queue.admission import Mode, PartialGroups, QueueSettings
from forge.runtime.settings import load
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler import validation
from services.scheduler.config import SchedulerConfig
from tests.support.scheduler.cluster import make_task


def changed(**fields: object) -> common_pb2.Task:
    task = make_task("a")
    for field, value in fields.items():
        setattr(task, field, value)
    return task


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        (changed(task_id=""), "task_id '' must be 1 to 200"),
        (changed(task_id="a:b"), "task_id 'a:b' must be"),
        (changed(domain="two words"), "domain 'two words' must be"),
        (changed(scaffold=""), "scaffold '' must be"),
        (changed(group_size=0), "group_size 0 must be 1 to 16"),
        (changed(group_size=17), "group_size 17 must be 1 to 16"),
        (changed(difficulty=float("nan")), "difficulty nan must be from 0 to 1"),
        (changed(difficulty=-0.1), "difficulty -0.1 must be from 0 to 1"),
        (changed(tag="x" * 201), "has more than 200 bytes"),
        (changed(payload_json=""), "payload_json '' is not JSON"),
        (changed(payload_json="{"), "payload_json '{' is not JSON"),
        (changed(payload_json="[" * 100_000), "is nested too deeply"),
        (changed(payload_json='{"a": NaN}'), "NaN is no number of JSON"),
        (changed(payload_json='{"a": 1e999}'), "1e999 is too large for a number"),
        (changed(payload_json='{"a": "\\ud83d"}'), "half a surrogate pair"),
        (changed(payload_json="3"), "payload_json '3' is not a JSON object"),
        (changed(payload_json='"' + "x" * (1 << 20) + '"'), "at most 1048576 are allowed"),
    ],
)
def test_invalid_task_is_named(task: common_pb2.Task, complaint: str) -> None:
    """The message gives the position in the request, the field and the value."""
    with pytest.raises(InvalidArgument, match=rf"tasks\[1\]: .*{complaint}"):
        validation.check_tasks([make_task("fine"), task], max_group_size=16)


def test_task_without_a_purpose_is_for_training() -> None:
    """A client without the field and one with it submit the same task."""
    unset = changed(purpose=common_pb2.PURPOSE_UNSPECIFIED)
    checked = validation.check_tasks([unset, make_task("a")], max_group_size=16)
    assert checked["a"].purpose == common_pb2.PURPOSE_TRAIN


def test_task_id_is_unique_in_a_request() -> None:
    """Two tasks with one id would be ambiguous."""
    with pytest.raises(InvalidArgument, match="'a' is twice in this request"):
        validation.check_tasks([make_task("a"), make_task("a", size=2)], max_group_size=16)


def test_claim_and_trajectory_must_agree() -> None:
    """A claim is named by its trajectory."""
    outcome = scheduler_pb2.FinishRolloutsRequest.Outcome(lease_id="a:0:1", trajectory_id="a:0:0")
    with pytest.raises(InvalidArgument, match=r"outcomes\[4\]: lease_id 'a:0:1' is not"):
        validation.check_result(outcome, 4)


@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf")])
def test_wait_time_must_be_a_number_of_seconds(wait_s: float) -> None:
    """An infinite wait or NaN is refused."""
    with pytest.raises(InvalidArgument, match="wait_s"):
        validation.check_wait_s(wait_s, max_wait_s=30.0)


def test_wait_time_is_capped() -> None:
    """No call takes longer than configured."""
    assert validation.check_wait_s(1e9, max_wait_s=30.0) == 30.0


def test_removed_setting_for_lost_shards_names_the_command() -> None:
    """In one line, by flag and in the TOML file alike."""
    with pytest.raises(ConfigError, match=r"no setting lost_shards.*forge pool declare-lost SHARD"):
        configured("--lost-shards=s1")


def configured(argv: str) -> SchedulerConfig:
    return load(SchedulerConfig, service="scheduler", argv=argv.split(), environ={})


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(QueueSettings)])
def test_queue_setting_outside_its_table_names_its_place(name: str) -> None:
    """Settings of the queue were once flat keys."""
    with pytest.raises(ConfigError, match=rf"no setting {name} .*did you mean queue\.{name} \("):
        configured(f"--{name.replace('_', '-')}=1")


def test_window_defaults_to_three_tenths_of_concurrency() -> None:
    """W = ceil(0.3 N) unless it is set."""
    assert configured("--queue.concurrency 32").queue.window_size == 10


def test_modes_are_configured_by_name() -> None:
    """`mode` and its bounds are set in the TOML file, or by flags, like all settings."""
    adaptive = "--queue.mode adaptive --queue.max-staleness-p99 6 --queue.max-shift-kl 0.1"
    queue = configured(adaptive).queue
    assert queue.mode is Mode.ADAPTIVE
    assert (queue.max_staleness_p99, queue.max_shift_kl) == (6.0, 0.1)
    with pytest.raises(ConfigError, match="mode"):
        configured("--queue.mode best")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--mode fifo --domain-shares a=1", "domain_shares = {'a': 1.0} has no effect with queue."),
        ("--mode fifo --window 4", "window = 4 has no effect with queue.mode = fifo"),
        ("--mode greedy --window 4", "window = 4 has no effect with queue.mode = greedy"),
        ("--mode greedy --max-shift-kl 0", "max_shift_kl = 0.0 has no effect with queue.mode = gr"),
        ("--max-staleness-p99 4", "max_staleness_p99 = 4.0 has no effect with queue.mode = windo"),
        ("--ahead 9", "ahead = 9 has no effect with queue.admission = window"),
        ("--mode fifo --admission running --ahead 9", "effect with queue.admission = running"),
        ("--partial-groups wait --max-attempts 9", "max_attempts = 9 has no effect with queue.par"),
        ("--mode adaptive --domain-shares a=1", "has no effect with queue.mode = adaptive"),
        ("--mode adaptive --window 4", "window = 4 has no effect with queue.mode = adaptive"),
        ("--mode adaptive --admission ahead", "queue.admission = 'ahead' has no effect with queue"),
        ("--mode adaptive --ahead 9", "ahead = 9 has no effect with queue.mode = adaptive"),
    ],
)
def test_setting_that_a_mode_ignores_is_refused(argv: str, said: str) -> None:
    """The error names the setting, its value and the mode."""
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        configured(argv.replace("--", "--queue."))
    assert str(caught.value).startswith("queue.")


@pytest.mark.parametrize(
    "argv",
    [
        "--mode fifo --admission ahead --ahead 9",
        "--mode greedy --domain-shares a=1 --admission running",
        "--mode windowed --window 4 --domain-shares a=1 --admission ahead --ahead 9",
        "--mode adaptive --max-staleness-p99 4 --max-shift-kl 0 --window 0 --domain-limits a=2",
    ],
)
def test_settings_that_a_mode_uses_are_accepted(argv: str) -> None:
    """A setting with an effect in the mode, or with its default value."""
    assert configured(argv.replace("--", "--queue.")).queue != QueueSettings()


def test_partial_groups_are_configured_by_name() -> None:
    """The default is `fill`: retries."""
    assert configured("").queue.partial_groups is PartialGroups.FILL
    assert configured("--queue.partial-groups wait").queue.partial_groups is PartialGroups.WAIT


def test_domain_limit_is_a_whole_number_of_groups() -> None:
    """Half a group cannot run."""
    with pytest.raises(ConfigError, match=r"domain_limits = 'code=1\.5' .* each a whole number"):
        configured("--queue.domain-limits code=1.5")


def test_activity_must_be_named() -> None:
    """A request without an activity changes nothing."""
    with pytest.raises(InvalidArgument, match="activity 0 must be one of RUNNING, PAUSED"):
        validation.check_activity(scheduler_pb2.ACTIVITY_UNSPECIFIED)


def test_share_of_zero_is_refused_by_name() -> None:
    """A domain that should not be trained is omitted from domain_shares."""
    with pytest.raises(ConfigError, match=r"queue.domain_shares = .* each a number above 0"):
        configured("--queue.domain-shares code=1,qa=0")


def test_rollout_timeout_cannot_exceed_the_token_lifetime() -> None:
    """It would fail at its end repeatedly, and its group with it."""
    with pytest.raises(ConfigError, match=r"session_ttl_s = 10800 must be at least queue\.roll"):
        configured("--queue.rollout-timeout-s 20000")
