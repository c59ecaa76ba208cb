"""A real Prometheus on real services, by the files of deploy/prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.process.ports import free_ports
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until, until_blocking
from tests.support.scheduler.cluster import SchedulerCluster
from tests.support.suite.forge_run import ForgeRun, end_runs

FILES = Path(__file__).parents[2] / "deploy/prometheus"
DASHBOARD = FILES.parent / "grafana/forge.json"
WITHOUT_EVENTS = {
    "Failed attempts per second",
    "Gateway: refused per second",
    "Drafts accepted, by head",
    "GPU use",
    "Replica behind, commits",
    "Failed calls per second",
    "Crashes of actors",
}
"""Panels that show no series on a run without failures, draft heads, GPUs and replicas."""
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs prometheus and promtool: apt-get install prometheus",
    ),
    pytest.mark.timeout(1800),
]


class Prometheus:
    """One process on the documented configuration, with shorter times."""

    def __init__(self, folder: Path) -> None:
        self.targets = folder / "forge-targets.json"
        config = (FILES / "prometheus.yml").read_text().replace("15s", "1s")
        (folder / "prometheus.yml").write_text(config)
        rules = (FILES / "forge.rules.yml").read_text().replace("for: 2m", "for: 2s")
        (folder / "forge.rules.yml").write_text(rules)
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, path: str) -> Any:
        """The data of one answer; None while there is none."""
        try:
            with urllib.request.urlopen(f"{self._url}/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def query(self, expression: str) -> list[Any]:
        """The series of an expression now. Raises `OSError` for one that Prometheus refuses."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/query?{words}", timeout=10) as answer:
            series: list[Any] = json.load(answer)["data"]["result"]
            return series

    def up(self) -> set[str]:
        """Services that are scraped with success."""
        found = self.ask("targets?state=active") or {"activeTargets": []}
        return {one["labels"]["service"] for one in found["activeTargets"] if one["health"] == "up"}

    def firing(self, alert: str) -> set[str]:
        """The services that an alert fires for."""
        found = self.ask("alerts") or {"alerts": []}
        return {
            one["labels"]["service"]
            for one in found["alerts"]
            if one["labels"]["alertname"] == alert and one["state"] == "firing"
        }


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    started = Prometheus(folder)
    yield started
    started.stop()


def test_rules_pass_promtool() -> None:
    """They fire and stay silent as their own tests say."""
    for words in (("check", "rules", "forge.rules.yml"), ("test", "rules", "forge.rules.test.yml")):
        subprocess.run(["promtool", *words], cwd=FILES, check=True)


async def test_alert_fires_for_a_pool_that_was_killed(
    forge: SchedulerCluster, prometheus: Prometheus, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Prometheus finds processes by the directory, those that start later too; the alert ends when
    the pool is back."""
    command = [
        *(sys.executable, "-m", "forge.cli.main", "targets"),
        *("--file", str(prometheus.targets), "--every", "1s"),
        *("--etcd", etcd.endpoint, "--cluster", cluster),
        *("--key-file", str(tmp_path / "key")),
    ]
    following = subprocess.Popen(command)
    try:
        await until(lambda: prometheus.up() == {"pool"})
        forge.start_scheduler()
        await until(lambda: prometheus.up() == {"pool", "scheduler"})
        await until(lambda: {"trainer", "gateway"} <= prometheus.firing("ForgeServiceMissing"))
        assert "pool" not in prometheus.firing("ForgeServiceMissing")
        forge.pools["s0"].kill()
        await until(lambda: "pool" in prometheus.firing("ForgeServiceMissing"))
        forge.start_pool()
        await until(lambda: "pool" not in prometheus.firing("ForgeServiceMissing"))
    finally:
        following.terminate()
        following.wait()


def test_dashboard_shows_a_real_run(
    prometheus: Prometheus, tmp_path: Path, forge_root: Path
) -> None:
    """Every query of the dashboard is answered, and every panel has data, but for those of events
    and devices that this run does not have."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=500, extra=("--eval-every-steps", "2"))
    run.start()
    command = [
        *(sys.executable, "-m", "forge.cli.main", "targets", "--run-dir", str(run.directory)),
        *("--file", str(prometheus.targets), "--every", "1s"),
    ]
    run.wait_for_step(1)
    following = subprocess.Popen(command)
    try:
        run.wait_for_step(6)
        until_blocking(lambda: prometheus.query("up"))
        (cluster,) = {one["metric"]["cluster"] for one in prometheus.query("up")}
        panels = {
            panel["title"]: [
                target["expr"].replace("$cluster", cluster) for target in panel["targets"]
            ]
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            if panel.get("targets")
        }

        def empty() -> set[str]:
            return {
                title
                for title, expressions in panels.items()
                for expression in expressions
                if not prometheus.query(expression)
            }

        until_blocking(lambda: empty() <= WITHOUT_EVENTS, limit_s=240.0)
        print(f"{len(panels)} panels, without series: {sorted(empty())}")
    finally:
        following.terminate()
        following.wait()
        end_runs()
