"""Writes forge.json, the Grafana dashboard. `make dashboard` runs it.

Each panel is a title, a unit of Grafana, and queries with their legends. Rows follow the way of a
sample: learning, queue, agents, inference, pool, processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("forge.json")
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""Panels of a row, and the size of one in Grafana's grid of 24 columns."""
Panel = tuple[str, str, Mapping[str, str]]
"""Title, unit, and legend by query. $at selects the cluster."""

ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Learning": (
        (
            "Held-out reward, with its 95 % interval",
            "none",
            {
                "forge_trainer_evaluation_mean_reward{$at}": "mean",
                "forge_trainer_evaluation_mean_reward_low{$at}": "low",
                "forge_trainer_evaluation_mean_reward_high{$at}": "high",
            },
        ),
        ("Reward by domain", "none", {"forge_trainer_reward{$at}": "{{domain}}"}),
        (
            "Reward components",
            "none",
            {"forge_trainer_reward_component{$at}": "{{name}}"},
        ),
        (
            "Entropy by domain, nats per token",
            "none",
            {"forge_trainer_domain_entropy{$at}": "{{domain}}"},
        ),
        (
            "Engine against trainer, nats per token",
            "none",
            {
                "forge_trainer_inference_gap_mean{$at}": "fresh samples",
                "forge_trainer_logprob_gap_mean{$at}": "all samples",
                "forge_trainer_engine_inference_gap_mean{$at}": "fresh, {{engine}}",
            },
        ),
        ("Reward by engine", "none", {"forge_trainer_engine_mean_reward{$at}": "{{engine}}"}),
        (
            "Staleness, weight versions",
            "none",
            {
                "forge_trainer_staleness_mean{$at}": "mean",
                "forge_trainer_staleness_max{$at}": "largest",
            },
        ),
        (
            "Where a step's time goes",
            "s",
            {
                "rate(forge_trainer_step_seconds_sum{$at}[5m])"
                " / rate(forge_trainer_step_seconds_count{$at}[5m])": "step",
                "forge_trainer_wait_seconds{$at}": "wait for a batch",
                "forge_trainer_publish_seconds{$at}": "publication",
                "forge_trainer_checkpoint_seconds{$at}": "checkpoint",
            },
        ),
        (
            "Trained tokens per second",
            "none",
            {"rate(forge_trainer_trained_tokens_total{$at}[5m])": "tokens/s"},
        ),
        ("Merge ratio", "none", {"forge_trainer_merge_ratio{$at}": "sample / tree tokens"}),
        ("Yield J", "none", {"forge_trainer_domain_yield_j{$at}": "{{domain}}"}),
    ),
    "Queue": (
        (
            "Groups by state",
            "none",
            {"sum by (state) (forge_scheduler_groups{$at})": "{{state}}"},
        ),
        (
            "Window and concurrency, groups",
            "none",
            {
                "max(forge_scheduler_window_groups{$at})": "window W",
                "max(forge_scheduler_concurrency_groups{$at})": "concurrency N",
                "max(forge_scheduler_running_limit_groups{$at})": "may run now",
            },
        ),
        (
            "Failed attempts per second",
            "none",
            {"sum by (kind) (rate(forge_scheduler_failures_total{$at}[5m]))": "{{kind}}"},
        ),
    ),
    "Agents": (
        (
            "Rollouts: running, ended per second",
            "none",
            {
                "sum(forge_runner_rollouts_running{$at})": "running",
                "sum by (result) (rate(forge_runner_rollouts_total{$at}[5m]))": "{{result}}/s",
            },
        ),
        (
            "Gateway: calls per second",
            "none",
            {"sum by (status) (rate(forge_gateway_requests_total{$at}[5m]))": "{{status}}"},
        ),
        (
            "Gateway: refused per second",
            "none",
            {"sum by (limit) (rate(forge_gateway_refused_total{$at}[5m]))": "{{limit}}"},
        ),
        (
            "Prompts: new, continued, branched",
            "none",
            {"sum by (how) (rate(forge_gateway_contexts_total{$at}[5m]))": "{{how}}"},
        ),
        (
            "Answers with a tool call that did not parse",
            "percentunit",
            {
                "sum(rate(forge_gateway_malformed_answers_total{$at}[5m]))"
                " / sum(rate(forge_gateway_turns_total{$at}[5m]))": "share",
            },
        ),
        (
            "Turns not yet durable",
            "bytes",
            {"forge_gateway_backlog_bytes{$at}": "{{instance}} to {{pool_shard}}"},
        ),
    ),
    "Inference": (
        (
            "Sampled tokens per second",
            "none",
            {"rate(forge_inference_sampled_tokens_total{$at}[1m])": "{{instance}}"},
        ),
        (
            "Requests: waiting, moved per second",
            "none",
            {
                "sum(forge_inference_queued_requests{$at})": "waiting",
                "sum(rate(forge_inference_requests_moved_total{$at}[5m]))": "moved/s",
            },
        ),
        (
            "Weight version in service",
            "none",
            {
                "forge_inference_weight_version{$at}": "{{instance}}",
                "max(forge_inference_weight_announced_version{$at})": "announced",
            },
        ),
        (
            "Prompts by place of prefill, per second",
            "none",
            {"sum by (place) (rate(forge_inference_placed_prefills_total{$at}[5m]))": "{{place}}"},
        ),
        (
            "Drafts accepted, by head",
            "percentunit",
            {
                "sum by (head) (rate(forge_inference_accepted_drafts_total{$at}[5m]))"
                " / sum by (head) (rate(forge_inference_drafted_tokens_total{$at}[5m]))": (
                    "{{head}}"
                ),
            },
        ),
        (
            "GPU use",
            "percent",
            {"DCGM_FI_DEV_GPU_UTIL{$at}": "{{instance}} {{gpu}}"},
        ),
    ),
    "Pool": (
        (
            "Commit, mean",
            "s",
            {
                "rate(forge_pool_commit_seconds_sum{$at}[5m])"
                " / rate(forge_pool_commit_seconds_count{$at}[5m])": "{{instance}}",
            },
        ),
        (
            "Disk: free, in use",
            "bytes",
            {
                "forge_pool_disk_free_bytes{$at}": "free {{instance}}",
                "forge_pool_live_bytes{$at}": "in use {{instance}}",
            },
        ),
        (
            "Replica behind, commits",
            "none",
            {"forge_pool_replica_lag_commits{$at}": "{{instance}}"},
        ),
    ),
    "Processes": (
        (
            "Processes that answer",
            "none",
            {'sum by (service) (up{job="forge", $at})': "{{service}}"},
        ),
        (
            "CPU",
            "percentunit",
            {'rate(process_cpu_seconds_total{job="forge", $at}[1m])': "{{service}} {{instance}}"},
        ),
        (
            "Memory",
            "bytes",
            {'process_resident_memory_bytes{job="forge", $at}': "{{service}} {{instance}}"},
        ),
        (
            "Calls served per second",
            "none",
            {"sum by (service) (rate(forge_rpc_calls_total{$at}[5m]))": "{{service}}"},
        ),
        (
            "Failed calls per second",
            "none",
            {
                'sum by (service, code) (rate(forge_rpc_calls_total{code!="OK", $at}[5m]))': (
                    "{{service}} {{code}}"
                ),
            },
        ),
        (
            "Crashes of actors",
            "none",
            {"sum by (actor) (increase(forge_actor_failures_total{$at}[1h]))": "{{actor}}"},
        ),
    ),
}
SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, in the form that Grafana imports."""
    return {
        "uid": "forge",
        "title": "Forge",
        "tags": ["forge"],
        "schemaVersion": 38,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    yield {
        "name": "cluster",
        "type": "query",
        "label": "Cluster",
        "datasource": SOURCE,
        "query": 'label_values(up{job="forge"}, cluster)',
        "refresh": 2,
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for name, row in ROWS.items():
        at = {"x": 0, "y": top, "w": 24, "h": 1}
        yield {"id": (number := number + 1), "type": "row", "title": name, "gridPos": at}
        top += 1
        for place, (title, unit, queries) in enumerate(row):
            line, column = divmod(place, COLUMNS)
            yield {
                "id": (number := number + 1),
                "type": "timeseries",
                "title": title,
                "datasource": SOURCE,
                "gridPos": {
                    "x": column * WIDTH,
                    "y": top + line * HEIGHT,
                    "w": WIDTH,
                    "h": HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
                "targets": list(_targets(queries)),
            }
        top += HEIGHT * -(-len(row) // COLUMNS)


def _targets(queries: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for letter, (query, legend) in zip("ABCDEFGH", queries.items(), strict=False):
        expr = query.replace("$at", 'cluster="$cluster"')
        yield {"refId": letter, "expr": expr, "legendFormat": legend}


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
