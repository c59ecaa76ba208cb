"""`forge support-bundle`: one archive for the report of a fault, without secrets.

Owns the parts and the archive; `forge.cli.doctor.redaction` removes secrets. A part that cannot be
read is a line of the manifest: most reports are made while something is down.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import ssl
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from forge.cli.command_exit import say
from forge.cli.connection import Connection, newest_run_directory
from forge.cli.doctor.cluster_doctor import cluster_findings
from forge.cli.doctor.machine import examine
from forge.cli.doctor.redaction import Redactor, describe
from forge.cli.json_rows import row_of
from forge.cli.options import SystemOptions
from forge.cli.rundir import RunDirectory
from forge.cli.service_settings import (
    PrintedSettings,
    Program,
    print_settings,
    programs_in,
    programs_of_run,
)
from forge.cli.status.system_state import read_state
from forge.client.stored.pool import PoolReader
from forge.core.errors import ForgeError, InvalidArgument, NotFound
from forge.core.extras import DISTRIBUTION
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc import Channels

LAST_LINES = 5000
"""Number of lines from the end of each log."""
LIMIT_S = 60.0
"""For each part that calls services."""
_METRICS_S = 5.0
_TEXTS = ("agents", "console", "gateway", "runner")
"""Processes that handle texts of agents, by the beginning of their names."""
_SECRET_FILES = (
    *("key_file", "token_file", "token_state_file", "rank_token_file"),
    "etcd_password_file",
    *("tls_key", "command_tls_key"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of the parts."""

    root: Path
    system: Connection | ForgeError
    """A running system, or why there is none."""
    run: Path | None = None
    """Directory of a run, running or not."""
    settings: Path | None = None
    """Directory of the services' settings files."""


class Bundle:
    """The parts that were collected so far."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self.parts: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Add a part; its secrets are removed, whatever its collector did."""
        self.parts[name] = self._redactor.text(text)

    def lack(self, name: str, error: BaseException) -> None:
        """Record why a part is missing."""
        self.missing[name] = self._redactor.text(describe(error))

    def collect(self, name: str, make: Callable[[], str]) -> None:
        """Add the part that `make` returns, or record its error."""
        # Whatever fails, the other parts are wanted.
        try:
            self.add(name, make())
        except Exception as error:
            self.lack(name, error)

    async def await_part(self, name: str, part: Awaitable[str]) -> None:
        """Collects a part, as `collect` does, within the time limit of a part."""
        try:
            async with asyncio.timeout(LIMIT_S):
                self.add(name, await part)
        except Exception as error:
            self.lack(name, error)

    def manifest(self) -> str:
        """Returns one line for each part, and one for each missing part with the reason."""
        lines = [f"ok       {name}: {len(text)} characters" for name, text in self.parts.items()]
        lines += [
            f"missing  {name}: {' '.join(reason.split())}" for name, reason in self.missing.items()
        ]
        return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[9:]))

    def write(self, path: Path) -> None:
        """Write the archive, for its owner alone. Raises `InvalidArgument`."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidArgument(f"--out {path}: {error.strerror}") from None
        folder = path.name.partition(".")[0]
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in {"MANIFEST.txt": self.manifest(), **self.parts}.items():
                content = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))


async def make_bundle(system: SystemOptions, *, settings: Path | None, out: Path | None) -> None:
    """Writes the archive, and prints its manifest and path. Raises `InvalidArgument`."""
    bundle = await collect_bundle(_sources(system, settings))
    path = out or Path(f"forge-support-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar.gz")
    bundle.write(path)
    say(bundle.manifest().rstrip("\n"))
    say(f"{path}: look through it before you send it.")


def _sources(system: SystemOptions, settings: Path | None) -> Sources:
    run = None
    try:
        if not system.etcd:
            run = system.run_dir or newest_run_directory(system.root)
    except ForgeError:
        # The system then has the same error.
        pass
    found: Connection | ForgeError
    try:
        found = system.resolved()
    except ForgeError as error:
        found = error
    return Sources(root=system.root, system=found, run=run, settings=settings)


async def collect_bundle(sources: Sources) -> Bundle:
    """Returns all parts that could be collected."""
    redactor = Redactor()
    redactor.add_variables(os.environ)
    _know_system(redactor, sources)
    bundle = Bundle(redactor)
    bundle.collect("versions.json", _versions)
    bundle.collect("environment.txt", _environment)
    for one in await asyncio.to_thread(_printed, sources, bundle):
        _know_settings(redactor, one)
        if one.errors:
            bundle.lack(f"settings/{one.program.name}.toml", InvalidArgument(one.errors[0]))
        else:
            bundle.add(f"settings/{one.program.name}.toml", redactor.settings(one.text))
    await _from_services(sources, bundle, redactor)
    for name, lines in _logs(sources, bundle):
        handles_texts = name.startswith(_TEXTS)
        bundle.add(f"logs/{name}.log", redactor.log(lines, handles_texts=handles_texts))
    await bundle.await_part("doctor.txt", _doctor(sources))
    return bundle


def _know_system(redactor: Redactor, sources: Sources) -> None:
    if sources.run is not None:
        redactor.add_file(RunDirectory(sources.run).key_file)
    if isinstance(sources.system, Connection):
        system = sources.system
        for path in (system.key_file, system.tls_key, system.etcd_password_file):
            if path:
                redactor.add_file(path)
        if system.bearer is not None:
            redactor.add(system.bearer.token())


def _know_settings(redactor: Redactor, printed: PrintedSettings) -> None:
    for key in _SECRET_FILES if printed.text else ():
        if path := str(printed.value(key)):
            redactor.add_file(path)
    models = printed.value("models") if printed.text else ""
    for model in models.values() if isinstance(models, dict) else ():
        if path := model.get("key_file", ""):
            redactor.add_file(path)


def _versions() -> str:
    wanted = sorted({one.metadata["Name"].lower() for one in metadata.distributions()})
    return json.dumps(
        {
            "forge": metadata.version(DISTRIBUTION),
            "python": sys.version,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": {name: metadata.version(name) for name in wanted},
        },
        indent=1,
    )


def _environment() -> str:
    """Names alone: a value may be a secret."""
    own = ("FORGE_", "CUDA_", "NVIDIA_", "OMP_", "GRPC_", "OTEL_", "PYTHON", "LD_")
    return "".join(f"{name}\n" for name in sorted(os.environ) if name.startswith(own))


def _printed(sources: Sources, bundle: Bundle) -> list[PrintedSettings]:
    programs: list[Program] = []
    try:
        programs += programs_in(sources.settings) if sources.settings else []
        programs += programs_of_run(sources.run) if sources.run else []
    except ForgeError as error:
        bundle.lack("settings", error)
    return print_settings(programs, check=False)


async def _from_services(sources: Sources, bundle: Bundle, redactor: Redactor) -> None:
    """Status, counts of the pool, metrics."""
    system = sources.system
    try:
        if isinstance(system, ForgeError):
            raise system
        async with system.open() as (coordinator, channels):
            status = _status(system, coordinator, channels, redactor)
            await bundle.await_part("status.json", status)
            await bundle.await_part("pool.json", _pool(coordinator, channels, redactor))
            await _metrics(system, coordinator, bundle)
    except ForgeError as error:
        for name in ("status.json", "pool.json", "metrics"):
            if name not in bundle.parts and name not in bundle.missing:
                bundle.lack(name, error)


async def _status(
    system: Connection, coordinator: Coordinator, channels: Channels, redactor: Redactor
) -> str:
    state = await read_state(coordinator, channels, cluster=system.cluster)
    return json.dumps(redactor.status(json.loads(state.as_json())), indent=1)


async def _pool(coordinator: Coordinator, channels: Channels, redactor: Redactor) -> str:
    reader = PoolReader(coordinator, channels)
    rows = [row_of(await reader.stats(shard)) for shard in await reader.shards()]
    return json.dumps(redactor.answers(rows), indent=1)


async def _metrics(system: Connection, coordinator: Coordinator, bundle: Bundle) -> None:
    """The present values of every process."""
    instances = await coordinator.all_instances()
    with_metrics = [one for one in instances if one.metadata.get("metrics")]
    if not with_metrics:
        bundle.lack("metrics", NotFound("no process is registered"))
    context = _client_tls(system)
    for one in with_metrics:
        read = asyncio.to_thread(_scrape, one, context)
        await bundle.await_part(f"metrics/{one.kind}-{one.instance_id}.prom", read)


def _client_tls(system: Connection) -> ssl.SSLContext | None:
    if not system.tls_ca:
        return None
    context = ssl.create_default_context(cafile=system.tls_ca)
    if system.tls_cert:
        context.load_cert_chain(system.tls_cert, system.tls_key)
    return context


def _scrape(instance: Instance, context: ssl.SSLContext | None) -> str:
    scheme = "https" if context else "http"
    url = f"{scheme}://{instance.metadata['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=_METRICS_S, context=context) as answer:
        return str(answer.read().decode())


def _logs(sources: Sources, bundle: Bundle) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the last lines of each process: of a run's files, or of the systemd journal."""
    try:
        if sources.run is not None:
            yield from _files(RunDirectory(sources.run).logs)
        else:
            yield from _journal()
    except (OSError, ForgeError) as error:
        bundle.lack("logs", error)


def _files(folder: Path) -> Iterator[tuple[str, Sequence[str]]]:
    for file in sorted(folder.iterdir()):
        if file.suffix == ".log":
            with file.open(errors="replace") as lines:
                yield file.stem, [line.rstrip("\n") for line in deque(lines, LAST_LINES)]


def _journal() -> Iterator[tuple[str, Sequence[str]]]:
    fields = "--output-fields=MESSAGE,_SYSTEMD_UNIT"
    argv = ["journalctl", "--no-pager", "--output=json", fields, f"--lines={LAST_LINES}"]
    try:
        ended = subprocess.run(
            [*argv, "--unit=forge-*"], capture_output=True, text=True, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"journalctl: {error}") from None
    by_unit: dict[str, list[str]] = {}
    for line in ended.stdout.splitlines():
        row = json.loads(line)
        unit = str(row.get("_SYSTEMD_UNIT", "")).removeprefix("forge-").removesuffix(".service")
        # A line that is no UTF-8 is a list of bytes.
        if isinstance(row.get("MESSAGE"), str):
            by_unit.setdefault(unit or "unknown", []).append(row["MESSAGE"])
    if not by_unit:
        raise NotFound(f"journalctl has no line of a unit forge-*: {ended.stderr.strip()[:200]}")
    yield from sorted(by_unit.items())


async def _doctor(sources: Sources) -> str:
    # On a thread: some checks run an event loop of their own.
    findings = await asyncio.to_thread(lambda: [*examine(sources.root, settings=sources.settings)])
    if isinstance(sources.system, Connection):
        findings += await cluster_findings(sources.system)
    return "".join(f"{line}\n" for finding in findings for line in finding.lines)
