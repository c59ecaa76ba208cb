"""Inventories for tests of `forge deploy`, and their rendered hosts."""

from __future__ import annotations

from pathlib import Path

from forge.cli.deploy.render.render import RenderResult, render

TWO_HOSTS = """
[hosts.alpha]
address = "10.0.0.1"
names = ["alpha.example"]
login = "local"
[hosts.alpha.services]
etcd = 1
pool-replica = ["s0"]
scheduler = 1
router = 1
prefill = 1
decode = 2
gateway = 2
console = 1
[hosts.alpha.env.decode-2]
JUDGE = 'a "b" $c'

[hosts.beta]
address = "10.0.0.2"
gpus = 2
[hosts.beta.services]
pool = 1
pool-replica = ["s0"]
scheduler = 1
trainer = 1
agents = 1
feed = ["math"]
[hosts.beta.env.feed-math]
FORGE_FEED = "--domain math"
[hosts.beta.settings.agents]
concurrency = 7

[backup]
at = "*:0/30"

[settings.scheduler.queue]
concurrency = 16
[settings.gateway.http]
port = 8100
"""
SMALL = """
[hosts.alpha]
address = "10.0.0.1"
services = { etcd = 1, scheduler = 1, decode = 1 }
[hosts.beta]
address = "10.0.0.2"
services = { scheduler = 1 }
"""
RANKS = """
checkpoints = "/mnt/checkpoints"
[hosts.alpha]
address = "10.0.0.1"
services = { etcd = 1, scheduler = 1 }
[hosts.beta]
address = "10.0.0.2"
gpus = 4
services = { prefill = 1, trainer-rank = 2 }
[hosts.beta.env.trainer-rank]
NCCL_SOCKET_IFNAME = "eth0"
[hosts.gamma]
address = "10.0.0.3"
gpus = 2
services = { trainer-rank = 2 }
"""
"""One trainer of four ranks on two hosts."""
RELEASE = "0.1.0"


def rendered(
    text: str, out: Path, *, check_settings: bool = False, rotate: str = ""
) -> RenderResult:
    """Render an inventory."""
    return render(
        text,
        out,
        source="cluster.toml",
        release=RELEASE,
        rotate=[rotate] if rotate else (),
        check_settings=check_settings,
    )
