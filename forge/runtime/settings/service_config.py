"""Settings of every service.

Owns the base class of each service's settings. Not here: where settings come from
(`forge.runtime.settings.reader`); the settings of one service, which are in its own `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
CLOCK_TOLERANCE_S = 86_400.0
"""More than any wrong time zone, less than a wrong date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Traces of rollouts by OpenTelemetry, with the extra `tracing`. All services need the same."""

    endpoint: str = ""
    """OTLP collector over gRPC, e.g. http://127.0.0.1:4317; empty: no traces."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of rollouts that are traced; a request with a traceparent decides by itself."""
    queue_spans: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Most spans that wait for the collector; further ones are dropped and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of every service."""

    config: str = ""
    """TOML file with settings."""
    print_config: bool = False
    """Print the settings in force as TOML and exit."""
    check: bool = False
    """Check the settings and this host's files and ports, print a line for each problem and exit:
    with 2 if there is one."""
    cluster: str = "default"
    """Name of the cluster; clusters share nothing in etcd."""
    etcd: str = "127.0.0.1:2379"
    """Endpoints of etcd: [https://]host:port, separated by commas."""
    etcd_user: str = ""
    """User in etcd; empty: <cluster>.<service>."""
    etcd_password_file: str = ""
    """File with the password of the user in etcd; empty: etcd demands none."""
    instance_id: str = ""
    """Id of this process, unique among the instances of its service; empty:
    <service>-<host>-<pid>."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port of gRPC; 0 takes a free one."""
    advertise_host: str = ""
    """Address at which others reach this host; empty: host."""
    metrics_port: Port = 0
    """Port of /metrics; 0 takes a free one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event in the log."""
    log_file: str = ""
    """File to append JSON lines to; empty: stderr."""
    audit_file: str = ""
    """File to append the audit log to; empty: to the log, at any log_level."""
    lease_ttl_s: Annotated[float, Meta(ge=2, le=300)] = 5.0
    """Time for which a dead process stays in discovery."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Longest wait for work in flight when the process stops."""
    key_file: str = ""
    """File with the cluster's signing keys, one a line."""
    tls_cert: str = ""
    """PEM certificate chain of this host."""
    tls_key: str = ""
    """PEM private key of tls_cert."""
    tls_ca: str = ""
    """PEM certificates that verify other hosts."""
    tls_client_auth: bool = True
    """Demand a client certificate signed by tls_ca (mutual TLS)."""
    insecure: bool = False
    """Allow plain TCP beyond the loopback interface."""
    accept_unsigned: bool = False
    """Accept directory entries without a signature, while services of an earlier release run."""
    accept_differing: bool = False
    """Start although settings that must be equal differ from those of running instances, while a
    change is rolled out; the log names them."""
    clock_tolerance_s: Annotated[float, Meta(ge=0, le=604_800)] = CLOCK_TOLERANCE_S
    """Time for which services accept a token after its expiry, because clocks of hosts differ."""
    tracing: TracingSettings = field(default_factory=TracingSettings)

    @classmethod
    def removed(cls) -> Mapping[str, str]:
        """Return, by former key without a successor, the remedy for the error."""
        return {}

    @classmethod
    def program(cls) -> str:
        """Return the command that starts the service."""
        return f"python -m {cls.__module__.rpartition('.')[0]}"

    def validate(self) -> None:
        """Raises `InvalidArgument` for settings that contradict each other."""

    def agreed(self) -> Mapping[str, str]:
        """Return the values on which instances must agree (`forge.runtime.settings.agreed`)."""
        return {}
