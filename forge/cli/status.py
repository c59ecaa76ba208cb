"""`forge status`: one look at a running stack."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from forge.cli.rundir import RunDirectory
from forge.cli.stack import READY_KINDS
from forge.client.operator import Operator
from forge.core.errors import ForgeError, NotFound
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc import Channels
from forge.runtime.security import Keyring, Security


async def show_status(path: Path, console: Console) -> None:
    """Print the instances and what each service says. Raises `NotFound` for no run."""
    directory = RunDirectory(path.resolve())
    endpoints_file = directory.path / "etcd.endpoints"
    if not endpoints_file.exists():
        raise NotFound(f"{path} is not a run directory: {endpoints_file.name} is missing")
    coordinator = await Coordinator.connect(
        endpoints_file.read_text().strip(), cluster=directory.path.name, timeout_s=3.0
    )
    channels = Channels(Security(Keyring.from_file(directory.key_file)))
    try:
        console.print(await _instances(coordinator))
        operator = Operator(coordinator, channels)
        for name, ask in (
            ("scheduler", operator.scheduler_status),
            ("inference", operator.inference_status),
            ("trainer", operator.trainer_status),
        ):
            try:
                console.print(f"[bold]{name}[/bold]\n{await ask()}", highlight=False)
            except ForgeError as error:
                console.print(f"[bold]{name}[/bold]\n[yellow]{error}[/yellow]", highlight=False)
    finally:
        await channels.close()
        await coordinator.close()


async def _instances(coordinator: Coordinator) -> Table:
    table = Table("kind", "instance", "address", "metadata", title="Registered in etcd")
    for kind in READY_KINDS:
        try:
            instances = await coordinator.discover(kind).wait(timeout_s=1.0)
        except ForgeError:
            table.add_row(kind, "[red]none[/red]", "", "")
            continue
        for instance in instances:
            metadata = " ".join(f"{k}={v}" for k, v in sorted(instance.metadata.items()))
            table.add_row(kind, instance.instance_id, instance.address, metadata)
    return table
