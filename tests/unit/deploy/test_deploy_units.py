"""The systemd units are what systemd accepts, and start what exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge.cli.credentials.certs_authority import HOST_CA, HOST_CERT, HOST_KEY
from forge.cli.deploy.render.assets import read_assets
from forge.runtime.coordination.etcd_roles import ROLES
from forge.runtime.coordination.etcd_users import password_file
from forge.runtime.process.startup import CANNOT_START
from forge.runtime.settings import ServiceConfig, load, settings_of
from services.pool.config import PoolConfig
from services.trainer.config import TrainerConfig
from services.trainer.torchrun_rank import END_S

DEPLOY = Path(__file__).parents[3] / "deploy"
SYSTEMD = DEPLOY / "systemd"
COMMON = SYSTEMD / "forge-.service.d" / "10-forge.conf"
UNITS = sorted(unit for unit in SYSTEMD.glob("forge*") if unit.is_file())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
BACKUP = SYSTEMD / "forge-pool-backup@.service"
"""It reads files and calls no service."""
ENGINE_DROP_IN = "forge-inference@decode-1.service.d/20-engine.conf"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units in a folder, with this environment's Python."""
    folder = tmp_path_factory.mktemp("units")
    shutil.copytree(SYSTEMD, folder, dirs_exist_ok=True)
    for unit in folder.glob("*.service"):
        text = unit.read_text().replace("/opt/forge/.venv/bin", str(Path(sys.executable).parent))
        # Verification looks for the program; etcd is a package of the host.
        unit.write_text(text.replace("/usr/bin/etcd", "/bin/true"))
    return folder


def analyze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@needs_systemd
def test_units_verify_without_output_on_stderr(installed: Path) -> None:
    """systemd-analyze verify warns of unknown keys and still returns 0."""
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    verified = analyze("verify", *(f"./{name}" for name in names), cwd=installed)
    assert (verified.returncode, verified.stderr) == (0, "")


@needs_systemd
def test_units_with_the_documented_drop_ins_verify(installed: Path, tmp_path: Path) -> None:
    """TLS, if etcd has a certificate and no password of a service, shared checkpoints, and an
    engine with an environment of its own."""
    folder = tmp_path / "units"
    shutil.copytree(installed, folder)
    shutil.copytree(DEPLOY / "systemd-tls", folder, dirs_exist_ok=True)
    drop_ins = documented_drop_ins()
    assert drop_ins.keys() == {"forge-trainer@.service.d/20-shared.conf", ENGINE_DROP_IN}
    for path, text in drop_ins.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(
            text.replace("/opt/forge/vllm/bin", str(Path(sys.executable).parent))
        )
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    names.append(ENGINE_DROP_IN.partition(".d/")[0])
    verified = analyze("verify", *(f"./{name}" for name in names), cwd=folder)
    assert (verified.returncode, verified.stderr) == (0, "")


def documented_drop_ins() -> dict[str, str]:
    """Those of deploy/README.md by their path."""
    page = (DEPLOY / "README.md").read_text()
    return dict(re.findall(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", page, re.S))


def test_engine_of_its_own_environment_starts_as_the_unit_does() -> None:
    """The same command with another Python, and a home that the instance may write to."""
    own = re.findall(r"^(\w+)=(.*)$", documented_drop_ins()[ENGINE_DROP_IN], re.M)
    commands = [value for key, value in own if key == "ExecStart"]
    (usual,) = (v for k, v in settings(SYSTEMD / "forge-inference@.service") if k == "ExecStart")
    # The empty one removes the unit's.
    assert commands == ["", usual.replace("/opt/forge/.venv/", "/opt/forge/vllm/")]
    found = dict(own)
    cache = f"%C/{found['CacheDirectory']}"
    variables = dict(one.split("=", 1) for one in found["Environment"].split())
    assert variables == {"HOME": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    # The unit mounts all else read-only.
    assert {"ProtectSystem=strict", "ProtectHome=yes"} <= {*COMMON.read_text().splitlines()}


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_unit_is_exposed_less_than_three(unit: Path, installed: Path) -> None:
    """The score of `systemd-analyze security`, from 0 to 10; the threshold is in tenths."""
    words = ("security", "--offline=true", "--no-pager", "--threshold=29", f"./{unit.name}")
    scored = analyze(*words, cwd=installed)
    assert scored.returncode == 0, scored.stdout.splitlines()[-1]


def test_common_settings_replace_none_of_a_unit() -> None:
    """A drop-in wins over the unit's own file, except for lists: another value needs a drop-in with
    a later name."""
    lists = {"SystemCallFilter", "RestrictAddressFamilies", "RestartPreventExitStatus", "After"}
    common = dict(settings(COMMON))
    for unit in SERVICES:
        for key, value in settings(unit):
            assert key in lists or common.get(key, value) == value, (unit.name, key)


def settings(file: Path) -> list[tuple[str, str]]:
    """Keys and values of a unit, in order."""
    return re.findall(r"^(\w+)=(.*)$", file.read_text(), re.M)


def test_every_unit_notifies_readiness_and_drains_on_stop() -> None:
    """The common settings; each unit has the time to drain before SIGKILL, and a watchdog."""
    common = COMMON.read_text().splitlines()
    assert {"Type=notify", "Restart=always", "NoNewPrivileges=yes"} <= {*common}
    assert f"RestartPreventExitStatus={CANNOT_START}" in common
    for unit in SERVICES:
        text = unit.read_text()
        if unit == BACKUP:
            continue
        assert re.search(r"^TimeoutStopSec=\d+", text, re.M), unit
        watched = SYSTEMD / f"{unit.name.replace('@', '@0')}.d" / "15-watchdog.conf"
        text += watched.read_text() if watched.exists() else ""
        assert "WatchdogSec=" in text or unit.name == "forge-etcd.service", unit


def test_every_service_has_its_own_user() -> None:
    """No service reads another's data; replicas are pools. sysusers creates each user."""
    users = (DEPLOY / "sysusers.d" / "forge.conf").read_text()
    for unit in SERVICES:
        name = re.sub(r"(-replica|-backup|-rank)?@?\.service$", "", unit.name)
        assert f"User={name}\n" in unit.read_text(), unit
        assert f"u {name} " in users, unit


def test_only_units_of_agents_and_feeds_have_no_key_of_the_cluster() -> None:
    """They have tokens: agents run other people's programs, and a feed only submits."""
    assert "Credential" not in BACKUP.read_text()
    for unit in (one for one in SERVICES if one != BACKUP):
        text = unit.read_text()
        name = unit.name.removesuffix(".service").removesuffix("@")
        token, etcd = name in ("forge-agents", "forge-feed"), name == "forge-etcd"
        assert ("/etc/forge/key" in text) == (not token and not etcd), unit
        credential = f"LoadCredential=token:/etc/forge/{name.removeprefix('forge-')}-token\n"
        assert (credential in text) == ("--token-file %d/token" in text) == token, unit


def test_tls_files_of_drop_ins_are_those_of_forge_certs() -> None:
    """A credential of a folder would have another name. A backup calls no service: a password that
    it does not have would keep its unit from starting."""
    for file in (DEPLOY / "systemd-tls").glob("*/*.conf"):
        text = file.read_text()
        if file.parent.name == f"{BACKUP.name}.d":
            assert file.name > "20-tls.conf" and "\nLoadCredential=\n" in text
            continue
        for name in (HOST_CERT, HOST_KEY, HOST_CA):
            assert f"LoadCredential={name}:/etc/forge/tls/{name}\n" in text, file
            assert f"=%d/{name}" in text, file


def test_each_unit_has_a_documented_etcd_password() -> None:
    """`forge etcd apply` names the file; a unit of another name has a documented link."""
    page = (DEPLOY / "README.md").read_text()
    files = {password_file(Path(), service).name for service in ROLES}
    for unit in SERVICES:
        name = unit.name.removesuffix(".service").removesuffix("@")
        link = re.search(rf"^ln -s (\S+) etcd/{name}\s", page, re.M)
        assert name == "forge-etcd" or unit == BACKUP or (link[1] if link else name) in files, unit


@pytest.mark.parametrize("unit", ["forge-trainer@.service", "forge-trainer-rank@.service"])
def test_trainer_unit_allows_time_to_write_a_checkpoint(unit: str) -> None:
    """A model's size decides the time: systemd waits longer than the trainer does."""
    text = (SYSTEMD / unit).read_text()
    limit = re.search(r"^TimeoutStopSec=(\d+)min$", text, re.M)
    assert limit is not None
    assert 60 * int(limit[1]) > TrainerConfig().drain_s + END_S


@pytest.mark.parametrize(
    ("unit", "config_type", "key"),
    [
        ("forge-trainer@.service", TrainerConfig, "checkpoint.dir"),
        ("forge-trainer@.service", TrainerConfig, "metrics_file"),
        ("forge-trainer-rank@.service", TrainerConfig, "metrics_file"),
        ("forge-pool@.service", PoolConfig, "data_dir"),
        ("forge-pool-replica@.service", PoolConfig, "data_dir"),
    ],
)
def test_environment_file_of_an_instance_may_move_its_data(
    unit: str, config_type: type[ServiceConfig], key: str
) -> None:
    """A flag of the unit would override it."""
    text = (SYSTEMD / unit).read_text()
    assert text.index("\nEnvironment=") < text.index("\nEnvironmentFile=")
    words = re.findall(r"^Environment=(.*)$", text, re.M)
    environ = dict(word.split("=", 1) for line in words for word in line.split())
    environ = {name: value.replace("%i", "1") for name, value in environ.items()}
    (flags,) = re.findall(r"-m \S+ (?:-- )?--config \S+(.*)$", text, re.M)
    argv = shlex.split(flags)

    def value() -> object:
        config = load(config_type, service="any", argv=argv, environ=environ)
        return settings_of(config)[key].value

    assert str(value()).startswith("%S/forge/")
    environ["FORGE_" + key.upper().replace(".", "__")] = "/mnt/shared"
    assert value() == "/mnt/shared"


def test_flags_of_a_unit_name_the_process_and_its_files_alone() -> None:
    """A flag wins over the `.env` file of an instance: shard and durability are changed there."""
    for unit in SERVICES:
        for flags in re.findall(r"-m \S+ (?:-- )?(--config .*)$", unit.read_text(), re.M):
            named = {word for word in shlex.split(flags) if word.startswith("--")}
            assert named <= {"--config", "--key-file", "--token-file", "--instance-id"}, unit


def test_units_of_torch_may_list_the_interfaces_of_their_host() -> None:
    """gloo and NCCL do so by a netlink socket before ranks meet; the common list has none."""
    assert "AF_NETLINK" not in dict(settings(COMMON))["RestrictAddressFamilies"]
    for name in ("trainer", "trainer-rank", "inference"):
        unit = settings(SYSTEMD / f"forge-{name}@.service")
        assert ("RestrictAddressFamilies", "AF_NETLINK") in unit, name


def test_an_etcd_that_panics_is_started_again() -> None:
    """Go exits with 2, as Forge does for wrong settings: a later drop-in empties that list."""
    (own,) = (SYSTEMD / "forge-etcd.service.d").iterdir()
    assert own.name > COMMON.name
    assert "\nRestartPreventExitStatus=\n" in own.read_text()


def test_every_unit_has_limits_of_tasks_and_memory() -> None:
    """Of agents the memory is less: theirs is not the services'. The common file would win."""
    common = COMMON.read_text()
    assert "\nTasksMax=8192\n" in common and "MemoryMax" not in common
    for unit in SERVICES:
        percent = 75 if unit.name == "forge-agents@.service" else 90
        assert f"\nMemoryMax={percent}%\n" in unit.read_text(), unit


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_unit_starts_a_module_that_exists(unit: Path) -> None:
    """A renamed module breaks this test before it breaks a host."""
    commands = {"forge-feed@.service": "queue submit", BACKUP.name: "pool scheduled-backup"}
    module = re.search(r"-m (\S+)", unit.read_text())
    command = f"ExecStart=/opt/forge/.venv/bin/forge {commands.get(unit.name)} "
    assert unit.name == "forge-etcd.service" or (
        command in unit.read_text()
        if unit.name in commands
        else module is not None and _runs(module[1])
    )


def _runs(module: str) -> bool:
    found = importlib.util.find_spec(module)
    assert found is not None
    package = found.submodule_search_locations is not None
    return not package or importlib.util.find_spec(f"{module}.__main__") is not None


def test_wheel_has_every_unit_and_setting() -> None:
    """`forge deploy render` of an installed release reads them below its prefix."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["data-files"]
    packed = {
        f"{folder.removeprefix('share/forge/')}/{path.name}": path
        for folder, patterns in globs.items()
        for pattern in patterns
        for path in DEPLOY.parent.glob(pattern)
    }
    assert {name: path.read_bytes() for name, path in packed.items()} == read_assets()


def test_a_backup_runs_once_and_may_take_its_time() -> None:
    """The common settings are those of a service that stays."""
    (own,) = BACKUP.with_name(f"{BACKUP.name}.d").iterdir()
    assert own.name > COMMON.name
    assert {"Type=oneshot", "Restart=no", "TimeoutStartSec=infinity"} <= {
        *own.read_text().splitlines()
    }
    timer = BACKUP.with_suffix(".timer").read_text()
    assert "\nOnCalendar=hourly\n" in timer and "\nPersistent=true\n" in timer
