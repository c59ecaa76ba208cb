"""Fuzz targets: texts of people and of other processes. Each is read, or refused with the
documented error."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.client.task_files import read_tasks
from forge.core.errors import ConfigError, DataLoss, InvalidArgument, Unauthenticated
from forge.core.named_tensor import HubPart, NamedTensor
from forge.runtime.security.tokens import Claims, Keyring, narrow, sign_text
from forge.runtime.settings import ServiceConfig, load, to_toml
from forge.runtime.weights import TensorEntry, WeightAnnouncement, WeightManifest
from forge.v1 import common_pb2
from services.gateway.config import GatewayConfig
from services.inference.config import InferenceConfig
from services.pool.config import PoolConfig
from services.scheduler.config import SchedulerConfig
from services.trainer.config import TrainerConfig
from services.trainer.leadership.lineage import LineageRecord
from tests.support.suite.damaged import damaged, damaged_json

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "input"
TASK = {"payload": {"question": "1+1"}, "domain": "d", "scaffold": "s", "group_size": 4} | {
    "difficulty": 0.5,
    "priority": 1,
    "agent_rewards": True,
    "user": "u",
    "models": ["old"],
}
MODELS = {
    "old": {"kind": "version", "open": True, "aliases": ["rival"], "group": "g"},
    "judge": {"kind": "engine", "model_path": "/m", "context_tokens": 3},
    "big": {"kind": "external", "url": "https://h:1/v1", "timeout_s": 3.5, "max_calls": 2},
    "here": {"kind": "embeddings", "url": "http://127.0.0.1:1/v1", "key_file": "/k"},
}
MANIFEST = {"weight_version": 3, "step": 2, "tensor_names": ["a"], "total_bytes": 4} | {
    "digest": "0",
    "source": "h:1",
}
STREAMED_MANIFEST = json.loads(
    WeightManifest(
        weight_version=3,
        tensors=(TensorEntry.of(NamedTensor(name="a", dtype="uint8", shape=(2,), data=b"ab")),),
        hub={"a": (HubPart("h.{}.w", (1,), 0, 1, 2),)},
    ).encode()
)
LINEAGE = {"lineage": "l", "fence": 1, "step": 2, "checkpoint": "h:/c", "fingerprint": "f"}
KEYRING = Keyring.from_bytes(b"k" * 32)
TOKEN = KEYRING.sign(
    Claims(subject="s", scopes=frozenset({"session"}), audience=frozenset({"PoolService"}))
)
CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "inference": InferenceConfig,
    "pool": PoolConfig,
    "scheduler": SchedulerConfig,
    "trainer": TrainerConfig,
}


@given(damaged_json(TASK), damaged_json(TASK))
def test_task_files(first: bytes, second: bytes) -> None:
    """Any file holds tasks, or is refused with its name."""
    FILE.write_bytes(first + b"\n" + second)
    try:
        read_tasks(FILE, common_pb2.Task(domain="d", scaffold="s", group_size=1))
    except InvalidArgument as error:
        assert str(FILE) in str(error)


@st.composite
def settings_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A service, and a damaged file of its settings."""
    service = draw(st.sampled_from(sorted(CONFIGS)))
    return service, draw(damaged(to_toml(CONFIGS[service]()).encode()))


@given(settings_files())
def test_settings(file: tuple[str, bytes]) -> None:
    """Any file holds settings, or is refused as `ConfigError`."""
    service, content = file
    FILE.write_bytes(content)
    try:
        load(CONFIGS[service], service=service, argv=["--config", str(FILE)], environ={})
    except ConfigError as error:
        assert str(error)


@given(damaged_json(MODELS))
def test_tables_of_models(tables: bytes) -> None:
    """Any JSON holds tables of models, or is refused as `ConfigError`; no http beyond loopback."""
    argv = [f"--models={tables.decode('latin-1')}"]
    try:
        config = load(GatewayConfig, service="gateway", argv=argv, environ={})
    except ConfigError as error:
        assert str(error)
    else:
        for model in config.models.values():
            assert not model.url.startswith("http://") or "://127." in model.url


def test_deeply_nested_settings() -> None:
    """A file nested too deeply is refused as `ConfigError`."""
    FILE.write_bytes(b"a = " + b"[" * 5000)
    with pytest.raises(ConfigError, match="cannot be read: maximum recursion"):
        load(PoolConfig, service="pool", argv=["--config", str(FILE)], environ={})


@given(damaged_json(MANIFEST), damaged_json(STREAMED_MANIFEST), damaged_json(LINEAGE))
def test_records_in_etcd(announced: bytes, manifest: bytes, lineage: bytes) -> None:
    """Any value is an announcement and a manifest of weights and a lineage record, or
    `DataLoss`."""
    for kind, value in (
        (WeightAnnouncement, announced),
        (WeightManifest, manifest),
        (LineageRecord, lineage),
    ):
        try:
            kind.decode(value)
        except DataLoss as error:
            assert str(error)


texts = damaged(TOKEN.encode(), narrow(TOKEN, "PoolService").encode()).map(
    lambda token: token.decode("latin-1")
)


@given(texts, st.text(max_size=4))
def test_tokens(token: str, text: str) -> None:
    """Any text is a token of the cluster, or `Unauthenticated`."""
    for verify in (
        lambda: KEYRING.verify(token, now_s=0.0),
        lambda: KEYRING.verify_signature(token, text, token),
    ):
        try:
            verify()
        except Unauthenticated as error:
            assert str(error)


@given(damaged_json({"aud": ["PoolService"]}))
def test_narrowed_tokens(narrowing: bytes) -> None:
    """The holder of a token can narrow it with any bytes: they are read, or `Unauthenticated`."""
    part = base64.urlsafe_b64encode(narrowing).rstrip(b"=").decode()
    signed = sign_text(TOKEN, part)
    try:
        claims = KEYRING.verify(f"{signed['signer']}.{part}.{signed['signature']}", now_s=0.0)
    except Unauthenticated as error:
        assert str(error)
    else:
        assert claims.audience <= {"PoolService"}


@given(damaged(b"k" * 40 + b"\n" + b"l" * 40))
def test_key_files(content: bytes) -> None:
    """Any file has keys, or is refused as `ConfigError`."""
    FILE.write_bytes(content)
    FILE.chmod(0o600)
    try:
        Keyring.from_file(FILE)
    except ConfigError as error:
        assert str(error)
