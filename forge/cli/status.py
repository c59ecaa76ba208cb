"""`forge status`: one look at a running stack."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.cli.connection import Connection
from forge.cli.stack import READY_KINDS
from forge.client.operator import Operator
from forge.core.errors import ForgeError
from forge.runtime.coordination import Coordinator


async def show_status(at: Connection, console: Console) -> None:
    """Print the instances and what each service says. Raises `Unavailable` without etcd."""
    async with at.open() as (coordinator, channels):
        console.print(await _instances(coordinator))
        operator = Operator(coordinator, channels)
        for name, ask in (
            ("scheduler", operator.scheduler_status),
            ("inference", operator.inference_status),
            ("trainer", operator.trainer_status),
        ):
            try:
                said = Text(str(await ask()))
            except ForgeError as error:
                said = Text(str(error), style="yellow")
            console.print(Text(name, style="bold"))
            console.print(said, soft_wrap=True)


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
