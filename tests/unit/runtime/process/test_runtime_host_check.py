"""`--check` of a service: its settings against the files and ports of this host."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.agents import __main__ as runner
from forge.agents.config import RunnerConfig
from forge.runtime.process import startup
from forge.runtime.security.tokens import Claims, Keyring
from services.gateway import __main__ as gateway
from services.gateway.config import GatewayConfig
from services.inference import __main__ as inference
from services.inference.config import InferenceConfig
from services.pool import __main__ as pool
from services.pool.config import PoolConfig
from services.trainer import __main__ as trainer
from services.trainer.config import TrainerConfig

KINDS: dict[str, tuple[Any, Any]] = {
    "gateway": (GatewayConfig, gateway.host_checks),
    "inference": (InferenceConfig, inference.host_checks),
    "pool": (PoolConfig, pool.host_checks),
    "trainer": (TrainerConfig, trainer.host_checks),
    "runner": (RunnerConfig, runner.host_checks),
}


def never() -> type:
    raise AssertionError("the service is not imported")


def checked(service: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the exit code of `--check`."""
    monkeypatch.setattr(sys, "argv", [service, "--check", *words])
    with pytest.raises(SystemExit) as ended:
        config_type, host_checks = KINDS[service]
        startup.run(service, config_type, never, host_checks)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("service", KINDS)
def test_default_settings_have_no_problem(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No output, and exit code 0."""
    assert checked(service, [], monkeypatch) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("service", "words", "said"),
    [
        ("pool", "--data-dir={tmp}/file/pool", "data_dir = '{tmp}/file/pool': {tmp}/file: Not a d"),
        ("pool", "--log-file={tmp}/file/log", "log_file = '{tmp}/file/log': {tmp}/file: Not a dir"),
        ("pool", "--key-file={tmp}/none", "key_file = '{tmp}/none': No such file or directory"),
        ("pool", "--key-file={tmp}/file", "key_file = '{tmp}/file': each line must be a key of at"),
        ("pool", "--key-file={tmp}/open", "key_file = '{tmp}/open' is open to every user: chmod o"),
        ("pool", "--tls-ca={tmp}/none", "tls_ca = '{tmp}/none': No such file or directory"),
        ("pool", "--host=10.1.2.3", "host = '10.1.2.3' is not a loopback address, so TLS is"),
        (
            "pool",
            "--host=192.0.2.1 --insecure=true --port=7211",
            "port = 7211: cannot assign requested address on 192.0.2.1; set host to an address of ",
        ),
        ("pool", "--etcd=10.1.2.3:1", "etcd = '10.1.2.3:1' is plaintext beyond loopback: write"),
        ("trainer", "--model-path={tmp}", "model_path = '{tmp}' is not a model directory: it has"),
        (
            "trainer",
            "--model-path={tmp}/lora",
            "model_path = '{tmp}/lora' is not a model directory: it has no config.json, only LoRA",
        ),
        (
            "trainer",
            "--model-path={tmp}/odd",
            "model_path = '{tmp}/odd': module 'torch' has no attribute 'float7'",
        ),
        ("trainer", "--device=cuda:99", "device = 'cuda:99' is not available on rank 0: "),
        ("trainer", "--evaluation.tasks={tmp}/file", "{tmp}/file holds no task"),
        ("trainer", "--metrics-file={tmp}/file/m", "metrics_file = '{tmp}/file/m': {tmp}/file: N"),
        ("gateway", "--model.reasoning-format=aloud", "reasoning format 'aloud' is unknown; there"),
        ("runner", "--token-file={tmp}/none", "token_file = '{tmp}/none': No such file or dir"),
        (
            "runner",
            "--token-file={tmp}/open",
            "token_file = '{tmp}/open': the token is not one of `forge token issue`",
        ),
        (
            "runner",
            "--token-file={tmp}/token --token-state-file={tmp}/file/state",
            "token_state_file = '{tmp}/file/state': {tmp}/file: Not a directory",
        ),
        (
            "trainer",
            "--read-from=ranks --ranks=2 --mesh.dp-shard=2 --rank-token-file={tmp}/none",
            "rank_token_file = '{tmp}/none': No such file or directory",
        ),
        (
            "trainer",
            "--read-from=ranks --ranks=2 --mesh.dp-shard=2 --rank-token-file={tmp}/open",
            "rank_token_file = '{tmp}/open': the token is not one of `forge token issue`",
        ),
        ("trainer", "--weights-dir={tmp}/file/w", "weights_dir = '{tmp}/file/w': {tmp}/file: Not"),
        (
            "inference",
            "--role=decode --kv.store-dir={tmp}/file/kv",
            "kv.store_dir = '{tmp}/file/kv': {tmp}/file: Not a directory",
        ),
        ("pool", "--etcd-user=pool", "etcd_user is set, so etcd_password_file must be set"),
        (
            "pool",
            "--etcd-password-file={tmp}/bytes",
            "etcd_password_file = '{tmp}/bytes': not UTF-8 text",
        ),
        ("runner", "--scaffolds=x=no_module:make", "no_module:make: cannot import no_module: No m"),
        ("runner", "--scaffolds=x=raises:make", "raises:make: cannot import raises: ZeroDivision"),
        (
            "runner",
            "--domains=x=ends:D",
            "ends:D: cannot import ends: SystemExit: bye (ends.py:2)\n",
        ),
        (
            "runner",
            "--domains=x=typo:D",
            "typo:D: cannot import typo: SyntaxError: '(' was never closed (typo.py, line 1)\n",
        ),
        ("runner", "--domains=x=half:D", "half:D is no domain, it has no max_turns, generate, ep"),
        ("runner", "--domains=x=half:E", "half:E: TypeError: E.__init__() missing 1 required pos"),
        (
            "trainer",
            "--objective.algorithm=typo:loss",
            "objective.algorithm = 'typo:loss': cannot import typo: SyntaxError: '(' was never cl",
        ),
        ("runner", "--domains=x", "domains: 'x' is not of the form name=module:attribute"),
    ],
)
def test_problem_is_one_line_with_the_setting(
    tmp_path: Path,
    service: str,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the exit code of wrong settings."""
    (tmp_path / "file").touch(0o600)
    (tmp_path / "open").write_text("k" * 32)
    (tmp_path / "open").chmod(0o644)
    claims = Claims(subject="r", scopes=frozenset({"runner"}))
    (tmp_path / "token").write_text(Keyring(keys=(b"k" * 32,)).sign(claims))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "raises.py").write_text("x = 1 / 0\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "typo.py").write_text("def loss(tokens:\n")
    (tmp_path / "half.py").write_text(
        "class D:\n    name = scaffold = 'd'\nclass E:\n    def __init__(self, path): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "qwen3", "dtype": "float7"}')
    for name in ("raises", "ends", "typo", "half"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert checked(service, words.format(tmp=tmp_path).split(), monkeypatch) == startup.CANNOT_START
    errors = capsys.readouterr().err
    assert errors.startswith(f"forge {service}: {said.format(tmp=tmp_path)}")
    assert errors.count("\n") == 1


def test_every_problem_of_a_service_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown keys, wrong values, contradictions and taken ports, in this order."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = ["--colour", "red", "--seed=x", "--evaluation.every-steps=2", f"--port={port}"]
        assert checked("trainer", words, monkeypatch) == startup.CANNOT_START
    lines = capsys.readouterr().err.splitlines()
    begins = ("--colour: ", "--seed: seed = 'x'", "evaluation.every_steps = 2", f"port = {port}: ")
    assert len(lines) == len(begins), lines
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(f"forge trainer: {begin}"), line
