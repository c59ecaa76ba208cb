"""The values on which instances must agree."""

from __future__ import annotations

import json
from pathlib import Path

from forge.runtime.settings.agreed import agreed_model, agreed_settings
from services.pool.config import PoolConfig, ReplicationSettings, RetentionSettings
from services.scheduler.config import SchedulerConfig


def test_table_is_compared_with_all_its_settings() -> None:
    """Values are JSON; the order of a table's keys does not count."""
    one, other = (
        SchedulerConfig().queue.__class__(domain_shares=shares)
        for shares in ({"a": 0.5, "b": 0.5}, {"b": 0.5, "a": 0.5})
    )
    agreed = [agreed_settings("s", SchedulerConfig(queue=queue), "queue") for queue in (one, other)]
    assert agreed[0] == agreed[1]
    assert (agreed[0]["s/queue.mode"], agreed[0]["s/queue.window"]) == ('"windowed"', "0")


def test_exported_model_is_the_same_model(tmp_path: Path) -> None:
    """A checkpoint's config.json has another type of the weights, also in a part of it."""
    values = []
    for number, dtype in enumerate(("float32", "bfloat16")):
        part = {"hidden_size": 8, "dtype": dtype}
        config = {"architectures": ["A"], "text_config": part, "torch_dtype": dtype}
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config, indent=number))
        values.append(agreed_model(str(folder)))
    assert values[0] == values[1]
    assert values[0]["/model config.json"].startswith("A ")


def test_missing_or_damaged_model_has_no_value(tmp_path: Path) -> None:
    """Its service reports it."""
    assert agreed_model("") == agreed_model(str(tmp_path / "none")) == {}
    (tmp_path / "config.json").write_text("[1]")
    assert agreed_model(str(tmp_path)) == {}


def test_settings_are_compared_among_replicas_of_one_shard() -> None:
    """An unreplicated shard has one instance."""
    kept = RetentionSettings(keep_bytes=1)
    assert PoolConfig(shard="0", retention=kept).agreed() == {}
    copies = ReplicationSettings(durability="replicated")
    replica = PoolConfig(shard="0", replication=copies, retention=kept).agreed()
    assert replica["pool 0/retention.keep_bytes"] == "1"
