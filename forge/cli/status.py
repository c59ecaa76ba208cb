"""`forge status`: prints the state of a running stack."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from forge.cli.clocks import compare_clocks
from forge.cli.connection import Connection
from forge.cli.stack import READY_KINDS
from forge.cli.trouble import troubles
from forge.client.operator import Operator
from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.process.clock_watch import REMEDY


async def show_status(at: Connection, console: Console) -> None:
    """Prints the instances and the status of each service. Raises `Unavailable` without etcd."""
    async with at.open() as (coordinator, channels):
        console.print(await _instances(coordinator))
        # Without retries: absent services are reported.
        operator = Operator(coordinator, channels, retry_for_s=0.0)
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "scheduler": operator.scheduler_status,
            "inference": operator.inference_status,
            "trainer": lambda: _trainer_status(operator),
        }
        trouble = await _troubles(operator)
        if trouble:
            console.print(trouble, soft_wrap=True)
        answers = await gather(*map(_status_or_error, asked.values()))
        for name, answer in zip(asked, answers, strict=True):
            console.print(Text(name, style="bold"))
            console.print(answer, soft_wrap=True)
        _, clocks = await compare_clocks(coordinator, channels)
        for line in clocks.lines():
            console.print(Text(f"{line}: {REMEDY}", style="yellow"), soft_wrap=True)


async def _trainer_status(operator: Operator) -> object:
    """Returns the trainer's status without the outcomes per task, which are thousands of lines."""
    status = await operator.trainer_status()
    for domain in status.latest_evaluation.domains.values():
        domain.ClearField("task_outcomes")
    return status


async def _troubles(operator: Operator) -> Text:
    """Returns the reasons why training waits; empty if the scheduler is unreachable."""
    try:
        status = await operator.scheduler_status()
    except ForgeError:
        return Text("")
    return Text("\n".join(troubles(status).values()), style="yellow")


async def _status_or_error(ask: Callable[[], Awaitable[object]]) -> Text:
    try:
        return Text(str(await ask()))
    except ForgeError as error:
        return Text(str(error), style="yellow")


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
            metadata = " ".join(f"{k}={v}" for k, v in sorted(instance.metadata.items()))
            table.add_row(kind, instance.instance_id, instance.address, metadata)
    return table
