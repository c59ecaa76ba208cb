"""`forge deploy render`: what each host gets, secrets, and repeated renders."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from typer.testing import CliRunner

from forge.cli.credentials.certs_authority import Authority
from forge.cli.deploy.render.render import rendered_hosts, rendered_inventory
from forge.cli.deploy.render.rendered import Manifest, digest
from forge.cli.main import app
from forge.core.errors import ConfigError, InvalidArgument
from forge.runtime.security.tokens import Keyring
from tests.support.deploy.inventories import TWO_HOSTS, rendered
from tests.support.deploy.rendered_files import file, toml, variables

SECRET_NAMES = ("key", "tls_key.pem", "agents-token")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rendered hosts; tests read them."""
    out = tmp_path_factory.mktemp("rendered") / "out"
    rendered(TWO_HOSTS, out)
    return out


def snapshot(out: Path) -> dict[Path, tuple[bytes, int, int]]:
    files = [path for path in out.rglob("*") if path.is_file()]
    return {one: (one.read_bytes(), one.stat().st_mode, one.stat().st_mtime_ns) for one in files}


def test_rendered_host_has_the_units_of_its_services_alone(out: Path) -> None:
    """With the drop-ins of every unit, and those of TLS."""
    units = file(out, "beta", "/etc/systemd/system")
    assert sorted(path.name for path in units.iterdir() if path.is_file()) == [
        *("forge-agents@.service", "forge-feed@.service", "forge-pool-backup@.service"),
        *("forge-pool-backup@.timer", "forge-pool-replica@.service", "forge-pool@.service"),
        *("forge-scheduler@.service", "forge-trainer@.service", "forge.target"),
    ]
    assert (units / "forge-.service.d/20-tls.conf").exists()
    assert not (units / "forge-etcd.service.d").exists()
    assert file(out, "alpha", "/etc/systemd/system/forge-etcd.service.d/30-tls.conf").exists()


def test_rendered_settings_join_defaults_cluster_and_host(out: Path) -> None:
    """The distribution's file, then the inventory's settings, then what follows from the hosts."""
    scheduler = toml(out, "alpha", "scheduler")
    assert scheduler["queue"] == {"concurrency": 16, "batch_groups": 64}
    assert scheduler["etcd"] == "https://10.0.0.1:2379" and scheduler["host"] == "10.0.0.1"
    assert toml(out, "beta", "agents")["concurrency"] == 7
    assert toml(out, "beta", "agents")["etcd_user"] == "default.runner@beta"
    # No GPU on alpha, two on beta.
    assert toml(out, "alpha", "inference")["device"] == "cpu"
    assert toml(out, "beta", "trainer")["device"] == "cuda:0"


def test_rendered_instances_have_role_gpu_and_port(out: Path) -> None:
    """A second gateway takes the next HTTP port; variables keep every character."""
    decode = variables(out, "alpha", "/etc/forge/inference@decode-2.env")
    assert decode == {"FORGE_ROLE": "decode", "JUDGE": 'a "b" $c'}
    assert variables(out, "beta", "/etc/forge/trainer@1.env") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert variables(out, "alpha", "/etc/forge/gateway@2.env") == {"FORGE_HTTP__PORT": "8101"}
    etcd = variables(out, "alpha", "/etc/forge/etcd-members.env")
    assert etcd["ETCD_INITIAL_CLUSTER"] == "alpha=https://10.0.0.1:2380"


def test_rendered_secrets_are_private(out: Path) -> None:
    """Mode 0600, below directories that only their owner opens."""
    assert (out / "hosts").stat().st_mode & 0o777 == 0o700
    assert (out / "secrets").stat().st_mode & 0o777 == 0o700
    found = [path for path in (out / "hosts").rglob("*") if path.is_file()]
    secret = [path for path in found if path.name in SECRET_NAMES or "/etcd" in str(path.parent)]
    assert len(secret) > 20
    secret = [
        path for path in secret if not path.is_relative_to(out / "hosts/alpha/root/etc/systemd")
    ]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}


def test_rendered_host_has_the_secrets_of_its_services_alone(out: Path) -> None:
    """etcd's root password is on one host; each runner's host has a user of its own."""
    assert sorted(path.name for path in file(out, "beta", "/etc/forge/etcd").iterdir()) == [
        *("forge-agents", "forge-feed", "forge-operator", "forge-pool", "forge-pool-replica"),
        *("forge-scheduler", "forge-trainer"),
    ]
    assert not file(out, "beta", "/etc/forge/etcd-users").exists()
    users = file(out, "alpha", "/etc/forge/etcd-users")
    root = (users / "root").read_text()
    assert file(out, "alpha", "/etc/forge/etcd/root").read_text() == root
    agents = file(out, "beta", "/etc/forge/etcd/forge-agents").read_text()
    assert agents == (users / "forge-runner@beta").read_text()
    assert not list((out / "hosts").rglob("ca-key.pem"))


def test_host_of_runners_alone_gets_no_key(tmp_path: Path) -> None:
    """Agents run other people's programs."""
    text = TWO_HOSTS + "[hosts.gamma]\naddress = '10.0.0.3'\nservices = {agents = 1}\n"
    rendered(text, tmp_path / "out")
    assert not file(tmp_path / "out", "gamma", "/etc/forge/key").exists()
    assert file(tmp_path / "out", "gamma", "/etc/forge/agents-token").exists()
    manifest = rendered_hosts(tmp_path / "out")["gamma"]
    assert not manifest.has_key
    names = {Path(one.path).name for one in manifest.files}
    assert "forge-operator" not in names


def test_rendered_certificate_has_every_name_of_the_host(out: Path) -> None:
    """And is signed by the CA that the host trusts."""
    pem = file(out, "alpha", "/etc/forge/tls/tls_cert.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns = set(names.get_values_for_type(x509.DNSName))
    assert dns == {"alpha", "alpha.example", "localhost"}
    assert "10.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    ca = x509.load_pem_x509_certificate(
        file(out, "alpha", "/etc/forge/tls/tls_ca.pem").read_bytes()
    )
    certificate.verify_directly_issued_by(ca)


def test_rendered_token_is_of_a_runner_and_recorded_by_the_admin(out: Path) -> None:
    """It is signed before etcd runs; the admin's host records it, without its signature."""
    token = file(out, "beta", "/etc/forge/agents-token").read_text().strip()
    keyring = Keyring.from_file(out / "secrets/key")
    claims = keyring.verify(token, now_s=datetime.now(UTC).timestamp())
    assert claims.scopes == {"runner"} and claims.audience == {"SchedulerService"}
    hosts = rendered_hosts(out)
    (entry, feed) = hosts["alpha"].tokens
    assert entry.token_id == claims.token_id and hosts["beta"].tokens == ()
    assert token not in (out / "hosts/alpha/manifest.json").read_text()
    assert feed.scopes == ("operator",) and feed.subject == "feed@beta"


def test_rendered_timer_has_the_schedule_of_the_inventory(out: Path) -> None:
    """And its runs the options; the service itself has no credential to wait for."""
    timer = file(out, "alpha", "/etc/systemd/system/forge-pool-backup@.timer.d/20-schedule.conf")
    assert timer.read_text().endswith("[Timer]\nOnCalendar=\nOnCalendar=*:0/30\n")
    options = variables(out, "alpha", "/etc/forge/pool-backup.env")
    assert options == {"FORGE_BACKUP": "--full-every 7d --keep 4"}
    (unit,) = (one for one in rendered_hosts(out)["alpha"].units if one.is_timer)
    assert unit.name == "forge-pool-backup@pool-replica-s0.timer" and not unit.instance_id
    assert [Path(one).name for one in unit.inputs] == [
        *("forge-pool-backup@.timer", "20-schedule.conf")
    ]
    service = file(out, "alpha", "/etc/systemd/system/forge-pool-backup@.service.d")
    assert "\nLoadCredential=\n" in (service / "30-no-credentials.conf").read_text()


def test_rendered_feed_has_an_operators_token_and_the_address(out: Path) -> None:
    """The token is for scheduler and pools alone, and lasts until after the next monthly render."""
    token = file(out, "beta", "/etc/forge/feed-token").read_text().strip()
    now_s = datetime.now(UTC).timestamp()
    claims = Keyring.from_file(out / "secrets/key").verify(token, now_s=now_s)
    assert claims.scopes == {"operator"}
    assert claims.audience == {"PoolService", "SchedulerService"}
    assert claims.expires_unix_s > now_s + 80 * 86_400
    assert variables(out, "beta", "/etc/forge/feed.env") == {
        "FORGE_ETCD": "https://10.0.0.1:2379",
        "FORGE_CLUSTER": "default",
    }
    assert variables(out, "beta", "/etc/forge/feed@math.env") == {"FORGE_FEED": "--domain math"}
    beta = rendered_hosts(out)["beta"]
    assert beta.data == ("/var/lib/forge/feed/math.jsonl",)
    (unit,) = (one for one in beta.units if one.kind == "feed")
    assert {"/etc/forge/feed-token", "/etc/forge/feed.env", "/etc/forge/feed@math.env"} < {
        *unit.inputs
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--epoch 2", "no such option: --epoch"),
        ("--group-size x", "--group-size 'x' must be a whole number"),
        ("other.jsonl", "got unexpected extra argument"),
        ("--domain 'math", "No closing quotation"),
    ],
)
def test_wrong_option_of_a_feed_is_refused(options: str, said: str, tmp_path: Path) -> None:
    """With the key of the instance, before any secret is made."""
    text = TWO_HOSTS.replace('FORGE_FEED = "--domain math"', f'FORGE_FEED = "{options}"')
    key = re.escape(f"cluster.toml: hosts.beta.env.feed-math.FORGE_FEED = {options!r} is not ")
    with pytest.raises(ConfigError, match=f"{key}allowed: {said}"):
        rendered(text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_manifest_names_every_file_and_what_units_read(out: Path) -> None:
    """A unit's inputs are its own files: another service's settings do not restart it."""
    manifest: Manifest = rendered_hosts(out)["alpha"]
    for one in manifest.files:
        path = file(out, "alpha", one.path)
        assert (digest(path.read_bytes()), path.stat().st_mode & 0o777) == (one.sha256, one.mode)
    units = {one.name: one for one in manifest.units}
    gateway = units["forge-gateway@2.service"]
    assert gateway.instance_id == "gateway-alpha-2"
    assert gateway.ports == {"grpc": 7232, "metrics": 9232, "http": 8101}
    assert "/etc/forge/gateway@2.env" in gateway.inputs
    assert "/etc/forge/scheduler.toml" not in gateway.inputs
    assert "/etc/forge/gateway@1.env" not in gateway.inputs
    assert units["forge-pool-replica@s0.service"].instance_id == "pool-alpha-s0"
    assert {path for unit in manifest.units for path in unit.inputs} <= {
        one.path for one in manifest.files
    }
    assert rendered_inventory(out).hosts[0].names == ("alpha.example",)


def test_new_member_of_etcd_restarts_no_other_one(tmp_path: Path) -> None:
    """The list of members is read at the first start alone: what the unit of a running member
    reads stays."""

    def read_by_alpha() -> dict[str, str]:
        alpha = rendered_hosts(tmp_path)["alpha"]
        (etcd,) = (one for one in alpha.units if one.kind == "etcd")
        return {one.path: one.sha256 for one in alpha.files if one.path in etcd.inputs}

    rendered(TWO_HOSTS, tmp_path)
    before = read_by_alpha()
    hosts = "".join(
        f'[hosts.{name}]\naddress = "10.0.0.{number}"\nservices = {{ etcd = 1 }}\n'
        for name, number in (("gamma", 3), ("delta", 4))
    )
    rendered(TWO_HOSTS.replace("[backup]", hosts + "[backup]"), tmp_path)
    assert read_by_alpha() == before
    members = variables(tmp_path, "alpha", "/etc/forge/etcd-members.env")["ETCD_INITIAL_CLUSTER"]
    assert members.count("=https://") == 3


def test_second_render_changes_nothing(tmp_path: Path) -> None:
    """No file is written again, no secret is replaced."""
    rendered(TWO_HOSTS, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    again = rendered(TWO_HOSTS, tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    assert again.secrets == [] and set(map(len, again.changed.values())) == {0}


def test_render_of_a_changed_inventory_changes_what_it_must(tmp_path: Path) -> None:
    """A removed worker's file goes, a removed host goes, and secrets stay."""
    rendered(TWO_HOSTS, tmp_path / "out")
    text = TWO_HOSTS.replace("decode = 2", "decode = 1").replace("[hosts.alpha.env.decode-2]\n", "")
    text = text.replace("JUDGE = 'a \"b\" $c'\n", "")
    report = rendered(text, tmp_path / "out")
    assert report.secrets == []
    assert report.changed["alpha"] == ["/etc/forge/inference@decode-2.env"]
    alone = text.partition("[hosts.beta]")[0].replace('pool-replica = ["s0"]\n', "")
    report = rendered(alone, tmp_path / "out")
    assert report.changed["beta"] == ["all: the host is no longer in the inventory"]
    assert set(rendered_hosts(tmp_path / "out")) == {"alpha"}


def certificate_of(out: Path, host: str) -> bytes:
    return file(out, host, "/etc/forge/tls/tls_cert.pem").read_bytes()


def test_certificate_is_renewed_before_its_end_or_for_a_new_name(tmp_path: Path) -> None:
    """Only that of the host in question."""
    out = tmp_path / "out"
    rendered(TWO_HOSTS, out)
    before = certificate_of(out, "alpha"), certificate_of(out, "beta")
    authority = Authority.load(out / "secrets/ca")
    names = ["beta", "10.0.0.2", "localhost", "127.0.0.1"]
    folder = out / "secrets/tls/beta"
    authority.issue(names, folder, days=20, common_name="beta", replace=True)
    report = rendered(TWO_HOSTS.replace("alpha.example", "alpha.test"), out)
    assert [line.partition(":")[0] for line in report.secrets] == [
        "new certificate of alpha",
        "new certificate of beta",
    ]
    assert "is for" in report.secrets[0] and "expires on" in report.secrets[1]
    assert certificate_of(out, "alpha") != before[0]
    assert file(out, "alpha", "/etc/forge/tls/tls_key.pem").stat().st_mode & 0o777 == 0o600


def test_rotation_replaces_what_it_names(tmp_path: Path) -> None:
    """Certificates, or tokens; passwords and the key stay."""
    out = tmp_path / "out"
    rendered(TWO_HOSTS, out)
    report = rendered(TWO_HOSTS, out, rotate="certificates")
    assert report.secrets == ["new certificate of alpha", "new certificate of beta"]
    report = rendered(TWO_HOSTS, out, rotate="tokens")
    feeds = "new token of the feeds on beta"
    assert report.secrets == ["new token of the runners on beta", feeds]
    assert "/etc/forge/agents-token" in report.changed["beta"]
    ended = CliRunner().invoke(
        app, ["deploy", "render", "--inventory", "x", "--out", str(out), "--rotate", "keys"]
    )
    assert ended.exit_code == 2 and "certificates, tokens" in ended.output


def test_token_is_renewed_before_its_end_and_for_a_new_key(tmp_path: Path) -> None:
    """A new host could not use the one before."""
    out = tmp_path / "out"
    rendered(TWO_HOSTS, out)
    file_ = out / "secrets/tokens/beta"
    stored = msgspec.json.decode(file_.read_bytes())
    stored["entry"]["expires_unix_s"] = datetime.now(UTC).timestamp() + 3600.0
    file_.write_bytes(msgspec.json.encode(stored))
    assert rendered(TWO_HOSTS, out).secrets == ["new token of the runners on beta"]
    (out / "secrets/key").unlink()
    report = rendered(TWO_HOSTS, out)
    tokens = [f"new token of the {one} on beta" for one in ("runners", "feeds")]
    assert report.secrets == ["new key of the cluster", *tokens]


def test_rotated_ca_reaches_hosts_before_their_certificates(tmp_path: Path) -> None:
    """Hosts trust both CAs in a rotation; certificates of the old one stay until its end."""
    out = tmp_path / "out"
    rendered(TWO_HOSTS, out)
    Authority.load(out / "secrets/ca").rotate(days=100)
    report = rendered(TWO_HOSTS, out)
    assert report.secrets == []
    assert report.changed["beta"] == ["/etc/forge/tls/tls_ca.pem"]
    Authority.load(out / "secrets/ca").finish_rotation()
    report = rendered(TWO_HOSTS, out)
    assert all("another CA" in line for line in report.secrets) and len(report.secrets) == 2


def test_wrong_setting_of_a_service_changes_no_host(tmp_path: Path) -> None:
    """Each service refuses its own; the line names the inventory, the key and the nearest one."""
    text = """
        settings = { pool = { store = { disk_reserve = 5 } } }
        [hosts.alpha]
        address = "10.0.0.1"
        services = { etcd = 1, pool = 1 }
    """
    with pytest.raises(InvalidArgument) as refused:
        rendered(text, tmp_path / "out", check_settings=True)
    line = str(refused.value)
    assert line.startswith("cluster.toml: settings of pool on alpha: ")
    assert "store.disk_reserve_bytes" in line and str(tmp_path) not in line
    assert not (tmp_path / "out/hosts/alpha").exists()
    assert rendered(
        text.replace("disk_reserve ", "disk_reserve_bytes "), tmp_path / "out", check_settings=True
    ).changed


def test_wrong_variable_of_an_instance_changes_no_host(tmp_path: Path) -> None:
    """The unit would not start; a fault of the file is one line, not one of each instance, too."""
    text = """
        settings = { pool = { store = { disk_reserve = 5 } } }
        [hosts.alpha]
        address = "10.0.0.1"
        services = { etcd = 1, pool = 2 }
        env = { pool-1 = { FORGE_PORT = "http" }, pool-2 = { OTHER = "1" } }
    """
    with pytest.raises(InvalidArgument) as refused:
        rendered(text, tmp_path / "out", check_settings=True)
    file, variable = str(refused.value).splitlines()
    assert "settings of pool on alpha: " in file and "disk_reserve = 5" in file
    assert variable.startswith(
        "cluster.toml: settings of pool-1 on alpha: FORGE_PORT: port = 'http'"
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            "[settings.gateway.http]\nport = 7211",
            "hosts.alpha: forge-pool@1.service and forge-gateway@1.service have the port 7211",
        ),
        (
            "[hosts.alpha.env.gateway-1]\nFORGE_PORT = '2379'",
            "hosts.alpha: forge-etcd.service and forge-gateway@1.service have the port 2379",
        ),
    ],
)
def test_port_of_two_units_changes_no_host(tmp_path: Path, settings: str, line: str) -> None:
    """The second unit would not start."""
    text = f"""
        [hosts.alpha]
        address = "10.0.0.1"
        services = {{ etcd = 1, pool = 1, gateway = 1 }}
        {settings}
    """
    with pytest.raises(ConfigError, match=f"cluster.toml: {line}; set another one"):
        rendered(text, tmp_path / "out")
    assert not (tmp_path / "out/hosts/alpha").exists()


def test_example_inventory_is_written_once_and_renders(tmp_path: Path) -> None:
    """`forge deploy init` overwrites nothing."""
    file_ = tmp_path / "cluster.toml"
    ended = CliRunner().invoke(app, ["deploy", "init", str(file_)])
    assert ended.exit_code == 0
    assert sorted(rendered(file_.read_text(), tmp_path / "out").files) == [
        *("forge-1", "forge-2", "forge-3")
    ]
    ended = CliRunner().invoke(app, ["deploy", "init", str(file_)])
    assert ended.exit_code == 2 and "exists; name another file" in ended.output
