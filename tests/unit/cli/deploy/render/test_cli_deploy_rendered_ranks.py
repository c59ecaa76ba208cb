"""Files of a trainer of several ranks."""

from __future__ import annotations

from pathlib import Path

from forge.cli.deploy.render.render import rendered_hosts
from tests.support.deploy.inventories import RANKS, rendered
from tests.support.deploy.rendered_files import file, toml, variables


def test_rendered_ranks_are_one_trainer_on_all_of_their_hosts(tmp_path: Path) -> None:
    """Each host has its number, the first one rank 0, which alone serves; all meet there."""
    out = tmp_path / "out"
    rendered(RANKS, out)
    for host, number, devices in (("beta", "0", "1,2"), ("gamma", "1", "0,1")):
        assert variables(out, host, "/etc/forge/trainer-rank.env") == {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_MASTER_ADDR": "10.0.0.2",
            "FORGE_CHECKPOINT__DIR": "/mnt/checkpoints",
        }
        own = variables(out, host, f"/etc/forge/trainer-rank@{number}.env")
        assert own["CUDA_VISIBLE_DEVICES"] == devices
        table = toml(out, host, "trainer")
        assert (table["ranks"], table["device"]) == (4, "cuda") and table["mesh"] == {"dp_shard": 4}
        shared = file(out, host, "/etc/systemd/system/forge-trainer-rank@.service.d/20-shared.conf")
        assert "\nReadWritePaths=/mnt/checkpoints\n" in shared.read_text()
        # The drop-ins of TLS read it on each host.
        assert file(out, host, "/etc/forge/etcd/forge-trainer-rank").exists()
    assert variables(out, "beta", "/etc/forge/trainer-rank@0.env")["NCCL_SOCKET_IFNAME"] == "eth0"
    beta, gamma = (rendered_hosts(out)[host].units[-1] for host in ("beta", "gamma"))
    assert (beta.name, gamma.name) == (
        "forge-trainer-rank@0.service",
        "forge-trainer-rank@1.service",
    )
    assert beta.instance_id == "trainer-beta-0" and gamma.instance_id == ""
    assert beta.ports == {"grpc": 7250, "metrics": 9250, "meeting": 29400} and gamma.ports == {}
    watchdog = "/etc/systemd/system/forge-trainer-rank@0.service.d/15-watchdog.conf"
    assert watchdog in beta.inputs and file(out, "beta", watchdog).exists()
    assert not file(out, "gamma", watchdog).exists()


def test_rendered_ranks_continue_with_fewer_hosts(tmp_path: Path) -> None:
    """With `min_trainer_hosts`: a range for torchrun, a directory in which hosts meet without the
    one of rank 0, and shards that follow the hosts."""
    out = tmp_path / "out"
    rendered("min_trainer_hosts = 1\n" + RANKS, out, check_settings=True)
    for host, number in (("beta", "0"), ("gamma", "1")):
        assert variables(out, host, "/etc/forge/trainer-rank.env") == {
            "PET_NNODES": "1:2",
            "PET_NPROC_PER_NODE": "2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "/mnt/checkpoints/hosts",
            "FORGE_CHECKPOINT__DIR": "/mnt/checkpoints",
        }
        own = variables(out, host, f"/etc/forge/trainer-rank@{number}.env")
        assert own["PET_LOCAL_ADDR"] == {"beta": "10.0.0.2", "gamma": "10.0.0.3"}[host]
        assert "PET_RDZV_CONF" not in own
        assert toml(out, host, "trainer")["mesh"] == {"dp_shard": 0}
        assert "meeting" not in rendered_hosts(out)[host].units[-1].ports
    rendered("min_trainer_hosts = 2\n" + RANKS, tmp_path / "all")
    fixed = variables(tmp_path / "all", "beta", "/etc/forge/trainer-rank.env")
    assert fixed["PET_NNODES"] == "2" and fixed["PET_MASTER_ADDR"] == "10.0.0.2"


def test_rendered_ranks_of_one_host_keep_their_checkpoints_there(tmp_path: Path) -> None:
    """Without a shared directory; the trainer's own settings accept the mesh."""
    text = """
        [hosts.alpha]
        address = "10.0.0.1"
        services = { etcd = 1, trainer-rank = 2 }
    """
    rendered(text, tmp_path / "out", check_settings=True)
    found = variables(tmp_path / "out", "alpha", "/etc/forge/trainer-rank.env")
    assert found["PET_NNODES"] == "1"
    assert found["FORGE_CHECKPOINT__DIR"] == "/var/lib/forge/trainer-rank-0"
    assert toml(tmp_path / "out", "alpha", "trainer")["device"] == "cpu"
