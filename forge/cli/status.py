"""`forge status`: prints the state of a running stack."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable

from rich.table import Column, Table
from rich.text import Text

from forge.cli.clocks import compare_clocks
from forge.cli.command_exit import console
from forge.cli.connection import Connection
from forge.cli.stack import READY_KINDS
from forge.cli.trouble import troubles
from forge.client.operator import Operator
from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.process.agreement import AGREED_KEY
from forge.runtime.process.clock_watch import REMEDY
from forge.v1 import scheduler_pb2


async def show_status(at: Connection) -> None:
    """Prints the instances and the status of each service. Raises `Unavailable` without etcd."""
    async with at.open() as (coordinator, channels):
        console.print(await _instances(coordinator))
        # Without retries: absent services are reported.
        operator = Operator(coordinator, channels, retry_for_s=0.0)
        scheduler, inference, trainer = await gather(
            _status_or_error(operator.scheduler_status()),
            _status_or_error(operator.inference_status()),
            _status_or_error(_trainer_status(operator)),
        )
        if isinstance(scheduler, scheduler_pb2.GetSchedulerStatusResponse):
            for trouble in troubles(scheduler).values():
                console.print(Text(trouble, style="yellow"), soft_wrap=True)
        answers = {"scheduler": scheduler, "inference": inference, "trainer": trainer}
        for name, answer in answers.items():
            console.print(Text(name, style="bold"))
            style = "yellow" if isinstance(answer, ForgeError) else ""
            console.print(Text(str(answer), style=style), soft_wrap=True)
        _, clocks = await compare_clocks(coordinator, channels)
        for line in clocks.lines():
            console.print(Text(f"{line}: {REMEDY}", style="yellow"), soft_wrap=True)


async def _trainer_status(operator: Operator) -> object:
    """Returns the trainer's status without the outcomes per task, which are thousands of lines."""
    status = await operator.trainer_status()
    for domain in status.latest_evaluation.domains.values():
        domain.ClearField("task_outcomes")
    return status


async def _status_or_error(status: Awaitable[object]) -> object:
    try:
        return await status
    except ForgeError as error:
        return error


async def _instances(coordinator: Coordinator) -> Table:
    columns = [
        Column(name, overflow="fold") for name in ("kind", "instance", "address", "metadata")
    ]
    table = Table(*columns, title="Registered in etcd")
    waits = [coordinator.discover(kind).wait(timeout_s=1.0) for kind in READY_KINDS]
    registered = await gather(*waits, return_exceptions=True)
    for kind, instances in zip(READY_KINDS, registered, strict=True):
        if isinstance(instances, Unavailable):
            table.add_row(kind, "[red]none[/red]", "", "")
            continue
        if isinstance(instances, BaseException):
            raise instances
        for instance in instances:
            metadata = " ".join(
                f"{key}={value}"
                for key, value in sorted(instance.metadata.items())
                if key != AGREED_KEY
            )
            table.add_row(kind, instance.instance_id, instance.address, metadata)
    return table
