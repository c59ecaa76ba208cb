"""JSON log lines and Prometheus metrics.

Formats them; each module owns its own events and metrics. Log levels: error, an operator
must act; warning, a failure that was handled; info, a change of state; debug, single calls.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from forge.core.errors import ConfigError

log = structlog.get_logger()

SECONDS_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    60,
)
"""From a unary call on loopback (0.35 ms) to a long rollout step."""

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Syslog's numbers of the levels, as in sd-daemon(3)."""

_metrics: dict[str, Any] = {}


def configure_logging(service: str, instance_id: str, *, level: str, file: str) -> None:
    """Write JSON lines with service and instance to `file` (stderr when empty).

    The systemd journal gets the level of each line as its priority. A line that cannot be written,
    as on a full disk, is dropped and counted. Raises ConfigError when the file cannot be opened.
    """
    target = _open(file) if file else sys.stderr
    stream = cast(TextIO, _LogStream(target))
    render: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    render += [_add_priority] if _is_journal(target) else []
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_identity(service, instance_id),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    # grpc, aiohttp and others log through the standard library: same file, same format.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *render,
            ],
            foreign_pre_chain=[
                _add_identity(service, instance_id),
                structlog.stdlib.add_logger_name,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def log_to_people() -> None:
    """Log warnings as text to stderr; standard output has the answer of a command."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Read per line: a caller may replace sys.stderr.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


class _LogStream:
    """Writes lines, and drops those that it cannot write: an error here would end the task that
    logs, such as the one that keeps a service in discovery."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._torn = False
        """The last line may lack its end."""

    def write(self, text: str) -> None:
        """Write a line, whole or not at all as far as the system allows."""
        try:
            self._target.write(f"\n{text}" if self._torn else text)
            self._target.flush()
            self._torn = False
        except OSError:
            self._torn = True
            _DROPPED_LINES.inc()

    def flush(self) -> None:
        """`write` has flushed."""


def _open(file: str) -> TextIO:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered: the last line before a kill -9 is in the file.
        return Path(file).open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log_file = {file!r}: {error.strerror}") from None


def _is_journal(stream: TextIO) -> bool:
    """Whether systemd reads the stream into its journal; see JOURNAL_STREAM in systemd.exec(5)."""
    if "JOURNAL_STREAM" not in os.environ:
        return False
    status = os.fstat(stream.fileno())
    return os.environ["JOURNAL_STREAM"] == f"{status.st_dev}:{status.st_ino}"


def _add_priority(_logger: Any, method: str, line: Any) -> Any:
    return f"<{_PRIORITIES.get(method, _PRIORITIES['info'])}>{line}"


def _add_identity(service: str, instance_id: str) -> structlog.typing.Processor:
    def add(
        _logger: Any, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"], event["instance"] = service, instance_id
        return event

    return add


def bind_context(**keys: str) -> None:
    """Add keys (trajectory_id=, session=...) to all later log lines of this task."""
    structlog.contextvars.bind_contextvars(**keys)


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """`forge_<service>_<noun>_total`, one object per name. No ids as labels."""
    return cast(Counter, _metric(Counter, name, help, labels))


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """`forge_<service>_<noun>_<unit>`, one object per name; values of a GPU have the names of
    NVIDIA's dcgm-exporter."""
    return cast(Gauge, _metric(Gauge, name, help, labels))


def histogram(
    name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = SECONDS_BUCKETS
) -> Histogram:
    """`forge_<service>_<noun>_seconds`, or another base unit with its own buckets."""
    return cast(Histogram, _metric(Histogram, name, help, labels, buckets=tuple(buckets)))


def _metric(kind: type[Any], name: str, help: str, labels: Sequence[str], **options: Any) -> Any:
    known = name.startswith(("forge_", "DCGM_FI_"))
    assert known, f"metric {name!r} must be named forge_<service>_..."
    if name not in _metrics:
        _metrics[name] = kind(name, help, tuple(labels), registry=REGISTRY, **options)
    return _metrics[name]


_DROPPED_LINES = counter(
    "forge_log_dropped_lines_total", "Lines that the log file or stderr did not take: a full disk."
)
