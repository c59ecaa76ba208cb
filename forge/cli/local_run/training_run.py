"""`forge run`: runs a stack with a campaign, up to the result table."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from forge.cli.command_exit import console, say
from forge.cli.local_run.campaign import Campaign, CampaignResult
from forge.cli.local_run.dataset import held_out_tasks
from forge.cli.local_run.disk_watch import DiskWatch, full_below
from forge.cli.local_run.display import (
    RunDisplay,
    evaluations_table,
    kept_note,
    result_notes,
    result_table,
)
from forge.cli.local_run.model_types import types_line, worker_types
from forge.cli.local_run.models.kept import MeasuredModel, measured_model
from forge.cli.local_run.models.models import ensure_model
from forge.cli.local_run.models.served_models import ensured, known
from forge.cli.local_run.plot import draw, read_evaluations
from forge.cli.local_run.preflight import preflight
from forge.cli.local_run.presets import CPU, EMBEDDED, Preset, Settings, merged, preset_for
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.stack import Stack, StackPlan, default_gateways
from forge.cli.rundir import RunDirectory, RunState, choose_run_directory
from forge.cli.settings_doctor import disk
from forge.client.operator import Operator
from forge.client.task_files import write_tasks
from forge.core.errors import ForgeError, InvalidArgument
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring

READY_TIMEOUT_S = 600.0
"""An engine of its own may load for minutes; a process that fails ends the wait at once."""
OPERATE_RETRY_S = 120.0
"""Retry time of commands: a restarted service may first rebuild its state."""
OBSERVE_RETRY_S = 2.0
"""Retry time of the display, which must not freeze: it polls a restarting service again."""


def directory_of(options: RunOptions, *, campaign: bool) -> RunDirectory:
    """Returns the named directory, or the one of the unfinished run, or a new one."""
    if options.run_dir:
        return RunDirectory(options.run_dir.resolve())
    new = new_state(options)
    return choose_run_directory(
        options.root.resolve(), model=new.model, seed=new.seed, campaign=campaign
    )


def new_state(options: RunOptions) -> RunState:
    """Returns the state of a run that has not started."""
    model = options.model or "tiny"
    return RunState(
        model=model,
        model_path="",
        seed=options.seed or 0,
        steps=preset_for(model).steps,
    )


def resumed(options: RunOptions, directory: RunDirectory) -> RunOptions:
    """Returns the options with those of the run's earlier starts, and prints the latter."""
    state = directory.load()
    if state is None:
        return options
    chosen, words = options.resuming(state.options)
    if words:
        say(f"Taken over from {directory.path}: {words}")
    return chosen


async def check_run(options: RunOptions, directory: RunDirectory, *, campaign: bool = True) -> None:
    """Raises one error with a line for each problem of the settings and of this machine, before any
    weights are made. Writes nothing into `directory`."""
    # It starts each service once, which imports torch.
    say("Checking the settings and this machine ...")
    if directory.path.exists():
        directory.require_unlocked()
    state = run_state(options, directory)
    if campaign:
        directory.require_campaign(state)
    preset = preset_of(options, state)
    with TemporaryDirectory(prefix="forge-check-") as scratch:
        # The trainer reads the tasks that the run is going to write.
        own = RunDirectory(Path(scratch))
        write_evaluation_tasks(options, own, state.seed, preset)
        plan = plan_of(options, directory, state, preset)
        plan = replace(plan, settings=settings_of(options, own, state, preset))
        if not plan.model_path and Path(state.model).is_dir():
            # The services check whether they can train and serve it.
            plan = replace(plan, model_path=str(Path(state.model).resolve()))
        models = known(options.other_models, plan.model_path, root=options.root)
        plan = replace(plan, models=models)
        await preflight(plan, preset, model=state.model, campaign=campaign)


async def open_run(
    options: RunOptions, directory: RunDirectory, *, campaign: bool = True
) -> RunState:
    """Returns the run's state, saved or new, with its starting weights on disk."""
    state = run_state(options, directory)
    if directory.load() is None:
        state = replace(state, campaign=campaign)
    if not state.model_path:
        path = await ensure_model(state.model, seed=state.seed, root=options.root)
        directory.create()
        state = replace(state, model_path=str(path))
    directory.save(state)
    write_evaluation_tasks(options, directory, state.seed, preset_of(options, state))
    return state


def write_evaluation_tasks(
    options: RunOptions, directory: RunDirectory, seed: int, preset: Preset
) -> None:
    """Writes the tasks of evaluations during training, if requested."""
    if options.eval_every_steps:
        tasks = held_out_tasks(
            preset.domains,
            seed=seed,
            count=preset.eval_tasks,
            attempts=preset.eval_attempts,
            tag="",
        )
        write_tasks(directory.eval_tasks, tasks)


def run_state(options: RunOptions, directory: RunDirectory) -> RunState:
    """Returns the saved state, or a new one. Raises `InvalidArgument` for a run of another model or
    seed than the options name."""
    state = directory.load()
    if state is None:
        state = new_state(options)
    else:
        directory.check_same(state, model=options.model, seed=options.seed)
    return replace(state, steps=options.steps or state.steps, options=options.kept())


def settings_of(
    options: RunOptions, directory: RunDirectory, state: RunState, preset: Preset
) -> Settings:
    """Returns the settings of every service: of the run, the preset and the command line."""
    mode = options.settings.get("scheduler", {}).get("queue.mode")
    chosen = merged(
        run_settings(state, preset, mode),
        preset.settings,
        evaluation_settings(options, directory),
        device_settings(options.device or CPU),
        options.settings,
    )
    return merged(worker_types(chosen, state.model_path), chosen)


def device_settings(device: str) -> Settings:
    """Returns the settings of the trainer and the workers of the policy for one device."""
    if device == CPU:
        return {}
    worker = {"device": device}
    trainer = worker | {"autocast": "auto", "publish_dtype": "auto"}
    return {"trainer": trainer, "prefill": worker, "decode": worker}


def evaluation_settings(options: RunOptions, directory: RunDirectory) -> Settings:
    """Returns the settings of evaluations during training, if requested."""
    if not options.eval_every_steps:
        return {}
    return {
        "trainer": {
            "evaluation.tasks": str(directory.eval_tasks),
            "evaluation.every_steps": str(options.eval_every_steps),
            # The campaign itself measures the last weights, and the first ones.
            "evaluation.at_end": "false",
        }
    }


def run_settings(state: RunState, preset: Preset, mode: str | None) -> Settings:
    """Returns the settings that depend on the run. `mode`: the scheduler's setting, if any; some
    modes have no shares: their batches have the mix of the queue."""
    shares = (
        ""
        if mode in ("fifo", "adaptive")
        else ",".join(f"{name}={share}" for name, share in preset.domains.items())
    )
    return {
        "trainer": {"max_steps": str(state.steps), "seed": str(state.seed)},
        "scheduler": {
            "queue.concurrency": str(preset.concurrency),
            "queue.batch_groups": str(preset.groups_per_step),
            "queue.domain_shares": shares,
        },
    }


def preset_of(options: RunOptions, state: RunState) -> Preset:
    """Returns the model's preset, changed by the command line."""
    preset = replace(preset_for(state.model), steps=state.steps)
    if options.eval_tasks:
        preset = replace(preset, eval_tasks=options.eval_tasks)
    return preset


def plan_of(
    options: RunOptions, directory: RunDirectory, state: RunState, preset: Preset
) -> StackPlan:
    """Returns the stack of a run; the command line overrides the preset."""
    return StackPlan(
        directory=directory,
        model_path=state.model_path,
        cluster=directory.path.name,
        etcd=options.etcd,
        settings=settings_of(options, directory, state, preset),
        gateways=options.gateways or default_gateways(os.cpu_count() or 1),
        console=options.console,
        engine=options.engine or EMBEDDED,
        engine_python=engine_python(options),
        trainer_processes=trainer_processes(options),
    )


def engine_python(options: RunOptions) -> str:
    """Returns the Python that runs the worker. Raises `InvalidArgument` for one that is missing."""
    if options.engine_python is not None:
        if not options.engine_python.is_file():
            raise InvalidArgument(f"--engine-python {options.engine_python}: there is no such file")
        return str(options.engine_python.absolute())
    own = Path(f".venv-{options.engine or EMBEDDED}/bin/python")
    return str(own.absolute()) if own.is_file() else sys.executable


def trainer_processes(options: RunOptions) -> int:
    """Returns the number of the trainer's processes. Raises `InvalidArgument` for two numbers."""
    chosen = options.settings.get("trainer", {}).get("ranks")
    processes = options.trainer_processes or 1
    if processes > 1 and chosen is not None:
        raise InvalidArgument(
            f"--trainer-processes {processes} and --set trainer.ranks={chosen} are "
            "both the number of ranks: leave one out"
        )
    return processes


async def started_plan(
    options: RunOptions, directory: RunDirectory, state: RunState, preset: Preset
) -> StackPlan:
    """Returns the stack of an open run, with the weights of its other models on disk."""
    models = await ensured(options.other_models, state.model_path, root=options.root)
    return replace(plan_of(options, directory, state, preset), models=models)


async def train(options: RunOptions) -> None:
    """Runs to the end and prints the result. Raises `ForgeError` with a remedy."""
    started = time.monotonic()
    directory = directory_of(options, campaign=True)
    result, measured = await run_campaign(options, directory)
    console.print(result_table(result, measured))
    with suppress(ForgeError):
        if evaluations := read_evaluations(directory.path):
            console.print(evaluations_table(evaluations))
    notes = result_notes(result, directory, time.monotonic() - started)
    for note in (kept_note(measured), *notes):
        say(note)
    # A missing picture must not fail the run.
    with suppress(ForgeError):
        draw([directory.path], directory.curves)
        say(f"Curves {directory.curves}")


async def run_campaign(
    options: RunOptions, directory: RunDirectory
) -> tuple[CampaignResult, MeasuredModel]:
    """Starts a run, or resumes that of the directory, and runs it to the end. Raises `ForgeError`
    with a remedy."""
    options = resumed(options, directory)
    await check_run(options, directory)
    with directory.locked():
        state = await open_run(options, directory)
        preset = preset_of(options, state)
        plan = await started_plan(options, directory, state, preset)
        with RunDisplay(console, total_steps=preset.steps) as display:
            if state.phase != "before":
                display.say(f"Resuming {directory.path}")
            return await _campaign(plan, preset, state.seed, display)


async def _campaign(
    plan: StackPlan, preset: Preset, seed: int, display: RunDisplay
) -> tuple[CampaignResult, MeasuredModel]:
    async with running(plan, display) as (stack, coordinator, channels):
        campaign = Campaign(
            operator=Operator(coordinator, channels, retry_for_s=OPERATE_RETRY_S),
            observer=Operator(coordinator, channels, retry_for_s=OBSERVE_RETRY_S),
            directory=plan.directory,
            preset=preset,
            seed=seed,
            on_progress=display.update,
        )
        result = await stack.guard(campaign.run())
        measured = await measured_model(
            coordinator,
            plan.directory.checkpoints / "latest",
            sampled_version=result.after.min_weight_version,
            last_step_version=result.last_step_version,
        )
        return result, measured


@asynccontextmanager
async def running(
    plan: StackPlan, display: RunDisplay
) -> AsyncIterator[tuple[Stack, Coordinator, Channels]]:
    """Starts a stack and connects to it; stops it at the end of the block."""
    stack = Stack(plan, on_event=display.process_event)
    room = disk(plan.directory.path, remedy="name another directory with --root")
    if not room.ok:
        display.say(f"{room.text}. {room.remedy}")
    try:
        display.say("Starting etcd and the services ...")
        await stack.start()
        security = Security(Keyring.from_file(plan.directory.key_file))
        coordinator = await Coordinator.connect(
            stack.endpoints, cluster=plan.cluster, signatures=security
        )
        channels = Channels(security)
        try:
            await stack.guard(
                stack.ready(
                    coordinator,
                    timeout_s=READY_TIMEOUT_S,
                    on_ready=lambda kind: display.say(f"  {kind} is ready"),
                )
            )
            if types := types_line(await coordinator.all_instances()):
                display.say(types)
            if stack.console:
                display.say(f"Console {stack.console}")
            directory, needed = plan.directory.path, full_below(plan.settings)
            watch = DiskWatch(directory, full_below=needed, say=display.say)
            watching = asyncio.create_task(watch.run())
            try:
                yield stack, coordinator, channels
            finally:
                await cancel_and_wait(watching)
        finally:
            await channels.close()
            await coordinator.close()
    finally:
        display.say("Stopping everything, the trainer after a checkpoint (Ctrl-C: at once) ...")
        await stack.stop()


async def serve(options: RunOptions) -> None:
    """Runs the stack until cancelled. Raises `ForgeError` with a remedy."""
    directory = directory_of(options, campaign=False)
    options = resumed(options, directory)
    await check_run(options, directory, campaign=False)
    with directory.locked():
        state = await open_run(options, directory, campaign=False)
        preset = preset_of(options, state)
        plan = await started_plan(options, directory, state, preset)
        with RunDisplay(console, total_steps=preset.steps) as display:
            async with running(plan, display) as (stack, _, _):
                display.say(f"All services run until Ctrl-C. See: forge status {directory.path}")
                await stack.guard(asyncio.Event().wait())
