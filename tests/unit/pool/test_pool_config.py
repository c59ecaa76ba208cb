"""Settings of the pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.runtime.settings import load
from services.pool.config import PoolConfig

FORMER = {
    "map_bytes": "store.map_bytes",
    "map_max_bytes": "store.map_max_bytes",
    "disk_reserve_bytes": "store.disk_reserve_bytes",
    "reader_threads": "store.reader_threads",
    "durability": "replication.durability",
    "min_copies": "replication.min_copies",
    "follower_timeout_s": "replication.follower_timeout_s",
    "verify_every_s": "replication.verify_every_s",
    "retention": "retention.mode",
    "keep_age_s": "retention.keep_age_s",
    "keep_bytes": "retention.keep_bytes",
}


@pytest.mark.parametrize(("flat", "nested"), FORMER.items())
def test_a_former_flat_setting_is_refused_with_its_key_in_a_table(
    flat: str, nested: str, tmp_path: Path
) -> None:
    """By file, by flag and by variable, in one line."""
    file = tmp_path / "pool.toml"
    file.write_text(f"{flat} = 1\n")
    for argv, environ in (
        ([f"--{flat.replace('_', '-')}=1"], {}),
        ([], {f"FORGE_{flat.upper()}": "1"}),
        (["--config", str(file)], {}),
    ):
        with pytest.raises(
            ConfigError, match=rf"no setting {flat} .*did you mean {nested} \("
        ) as error:
            load(PoolConfig, service="pool", argv=argv, environ=environ)
        assert "\n" not in str(error.value)
