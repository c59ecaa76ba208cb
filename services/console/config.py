"""Settings of the console."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.runtime.settings import Port, ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP listener."""

    port: Port = 0
    """HTTP port; 0 takes a free one."""
    hosts: tuple[str, ...] = ()
    """Other host names by which browsers reach the console, such as a proxy's. With any, every
    reader needs a token."""
    login: Literal["auto", "always"] = "auto"
    """Readers log in with a token: auto (unless the console is on loopback without other hosts),
    always."""
    steering: bool = False
    """Allow changes without login, too: on loopback by every user of the host. With a login,
    operators may always make changes."""
    max_viewers: Annotated[int, Meta(ge=1)] = 64
    """Most pages with live updates; further ones get 429."""
    max_requests: Annotated[int, Meta(ge=1)] = 16
    """Most requests in flight that read other services; further ones get 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig(ServiceConfig):
    """A web page of a running system: curves, the window, trajectories, weights, services."""

    model_path: str = ""
    """Model directory with tokenizer.json, to show tokens as text; empty: ids alone."""
    call_timeout_s: Annotated[float, Meta(ge=0.1)] = 5.0
    """Deadline of a call to a service."""
    fetch_timeout_s: Annotated[float, Meta(ge=1)] = 30.0
    """Deadline of a request of the browser, such as the read of a long trajectory."""
    action_timeout_s: Annotated[float, Meta(ge=1)] = 600.0
    """Deadline of a change by an operator; a rollback writes a version to the trainer's disk."""
    poll_s: Annotated[float, Meta(ge=0.2)] = 1.0
    """Pause between two reads of the scheduler, the trainer and inference, while a page is open."""
    services_poll_s: Annotated[float, Meta(ge=1)] = 5.0
    """Pause between two health checks of every service, while its page is open."""
    max_steps: Annotated[int, Meta(ge=100)] = 4000
    """Most optimizer steps in memory and in a page; above it the console leaves out every second
    older step."""
    compare: tuple[str, ...] = ()
    """Directories of other runs, or their metrics.jsonl; the overview shows their curves beside
    this run's."""
    max_cache_mib: Annotated[float, Meta(ge=1)] = 256.0
    """Memory for the trajectories that were read last."""
    http: HttpSettings = field(default_factory=HttpSettings)

    def validate(self) -> None:
        """Raises `InvalidArgument` for a host name with a scheme or a path."""
        for name in self.http.hosts:
            if "/" in name:
                raise InvalidArgument(
                    f"http.hosts: {name!r} must be a host name, with a port unless it is the "
                    "default one"
                )
