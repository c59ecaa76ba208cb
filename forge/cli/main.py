"""The `forge` command. Each subcommand parses its arguments and calls one function."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import Commands, finish, say
from forge.cli.command_exit import console as terminal
from forge.cli.connection import Connection, of_run
from forge.cli.credentials.certs import certs_app
from forge.cli.credentials.etcd import etcd_app
from forge.cli.credentials.token import token_app
from forge.cli.deploy.command import deploy_app
from forge.cli.help_pages import join_lines
from forge.cli.local_run.run_options import OF_CAMPAIGN, Root, RunOptions, Seed
from forge.cli.options import SystemOptions, duration_s, with_options
from forge.cli.pool.command import pool_app
from forge.cli.pool.trajectories import trajectories_app
from forge.cli.queue.command import Json, queue_app
from forge.cli.weights import weights_app
from forge.core.errors import InvalidArgument
from forge.core.extras import require_extra

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
model_app = typer.Typer(no_args_is_help=True, help="Get starting weights, export trained ones.")
trainer_app = typer.Typer(no_args_is_help=True, help="Plan a trainer of several ranks.")
app.add_typer(model_app, name="model")
app.add_typer(trainer_app, name="trainer")
app.add_typer(trajectories_app, name="trajectories")
app.add_typer(pool_app, name="pool")
app.add_typer(queue_app, name="queue")
app.add_typer(weights_app, name="weights")
app.add_typer(token_app, name="token")
app.add_typer(certs_app, name="certs")
app.add_typer(etcd_app, name="etcd")
app.add_typer(deploy_app, name="deploy")

_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Of a command whose program parses all arguments itself."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        terminal.print(metadata.version("forge-rl"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Trains any LLM agent by reinforcement learning.

    Start with [bold]forge run[/bold], which trains a small model in minutes. [bold]forge up[/bold]
    starts the services for your own agent and tasks. [bold]forge COMMAND --help[/bold] has the
    options of a command.
    """


@app.command()
@with_options
def run(options: RunOptions) -> None:
    """Train a model end to end on this machine and print the result.

    Starts every service as a separate process, measures held-out tasks, trains, measures
    again and stops everything. After an interruption the same command resumes the run, also
    without its options.

    [dim]forge run --model smollm2 --device cuda:0 --set trainer.optimizer.learning_rate=2e-5[/dim]

    To train your own agent on your own tasks, use [bold]forge up[/bold].
    """
    from forge.cli.local_run.training_run import train

    finish(lambda: train(options), "Interrupted. Run the same command again to resume.")


@app.command()
@partial(with_options, omit=OF_CAMPAIGN)
def up(options: RunOptions) -> None:
    """Start every service and keep them running until Ctrl-C.

    Then use further terminals. [bold]forge agents run --command PROGRAM[/bold] starts your agent
    once per rollout, with the gateway's address in its environment.
    [bold]forge queue submit TASKS.jsonl[/bold] submits tasks. [bold]forge status[/bold] and
    [bold]forge top[/bold] show the run, [bold]forge model export[/bold] writes the trained model.
    docs/agents.md has these steps in full.

    [dim]forge up --set runner.concurrency=4 --set runner.command='python agent.py {prompt}'[/dim]
    """
    from forge.cli.local_run.training_run import serve

    finish(lambda: serve(options), "Stopped.")


@app.command()
@with_options
def status(
    system: SystemOptions,
    directory: Annotated[Path | None, typer.Argument(help="The same as --run-dir.")] = None,
    json: Json = False,
) -> None:
    """Show the state of a running stack: services, queue, training, and a remedy for each problem.

    --json prints one object with the keys cluster, services, missing, problems, errors, scheduler,
    inference and trainer; the last three have the fields of the services' status responses.
    """
    from forge.cli.status.command import show_status

    async def main() -> None:
        await show_status(of_run(directory) if directory else system.resolved(), as_json=json)

    finish(main, "")


@app.command()
@with_options
def top(
    at: Connection,
    every: Annotated[str, typer.Option(help="Time between two readings, e.g. 5s.")] = "2s",
) -> None:
    """Watch a running stack: queue and window, reward, throughput, staleness, services. q quits.

    Without a terminal it prints one snapshot.
    """
    from forge.cli.status.top import show_top

    finish(lambda: show_top(at, every_s=duration_s("every", every) or 2.0), "")


@app.command()
@with_options
def console(
    at: Connection,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, show_default="7800, or a free one", help="Port of the page."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model directory, to show tokens as text. Default: the run's.")
    ] = "",
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of another run: its curves beside this one's. Repeatable."),
    ] = None,
) -> None:
    """Serve the web console: curves, the window, trajectories, weights, services.

    On loopback it needs no login and changes nothing. Beyond loopback readers log in with a token
    of [bold]forge token issue[/bold], and operators can make changes.
    """
    from forge.cli.local_run.web_console import serve_console

    serve_console(at, host=host, port=port, model_path=model, compare=compare or ())


@app.command()
@with_options
def targets(
    at: Connection,
    file: Annotated[
        Path | None, typer.Option(help="JSON file of Prometheus' file_sd. Default: stdout.")
    ] = None,
    every: Annotated[
        str, typer.Option(help="Time between two readings, e.g. 15s. Default: read once.")
    ] = "",
) -> None:
    """List the /metrics addresses of all processes, in the form of Prometheus' file_sd.

    With --every the file follows the directory in etcd, until Ctrl-C.
    """
    from forge.cli.status.targets import write_targets

    every_s = duration_s("every", every)
    finish(lambda: write_targets(at, file=file, every_s=every_s), "Stopped.")


@app.command()
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run directories or metrics.jsonl files; several are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture file: .svg, .png or .pdf. Default: curves.svg in the run's directory; of "
            "several runs, comparison.svg in that of the first."
        ),
    ] = None,
) -> None:
    """Draw a run's curves: reward, entropy, staleness, merging and time over optimizer steps."""
    from forge.cli.local_run.plot import draw
    from forge.cli.rundir import RunDirectory

    first = runs[0]
    own = RunDirectory(first if first.is_dir() else first.parent)
    target = out or (own.curves if len(runs) == 1 else own.comparison)
    draw(runs, target)
    say(str(target))


@app.command()
@with_options
def doctor(
    system: SystemOptions,
    engine: Annotated[
        str,
        typer.Option(help="Check this inference engine instead, e.g. tensorrt_llm."),
    ] = "",
    engine_python: Annotated[
        Path | None, typer.Option(help="With --engine: the Python of the engine's environment.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model directory: check its chat template; with --engine also that the engine can "
            "serve it."
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the services' files, e.g. /etc/forge: check settings, ports, "
            "certificates, disks, devices and the gateway's model."
        ),
    ] = None,
) -> None:
    """Check this machine: Python, packages, torch, GPUs, etcd, disk, memory, open files, sandbox.

    With --settings it also checks the services of this host, with --etcd or --run-dir also etcd and
    the clocks of that system's hosts. Each line is one check, with the remedy of a problem; the
    exit code is 1 after a problem.
    """
    if engine:
        from forge.cli.doctor.engine_doctor import examine_engine

        raise typer.Exit(examine_engine(engine, python=engine_python, model=model))

    from forge.cli.doctor.machine import examine
    from forge.cli.finding import report

    named = system.resolved() if system.named else None
    ok = True
    for finding in examine(system.root, cluster=named, settings=settings, model=model):
        report(finding)
        ok &= finding.ok
    raise typer.Exit(0 if ok else 1)


@app.command("support-bundle")
@with_options
def support_bundle(
    system: SystemOptions,
    settings: Annotated[
        Path | None,
        typer.Option(help="Directory of the services' files on this host, e.g. /etc/forge."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New archive. Default: forge-support-<time>.tar.gz here.")
    ] = None,
) -> None:
    """Collect an archive for a fault report, without secrets and without texts of agents.

    It has versions, settings, status, counts of queue and pool, metrics, the findings of
    [bold]forge doctor[/bold], and the last lines of each log: of a run's directory, or of the
    systemd journal. Services may be down; MANIFEST.txt names missing parts.
    """
    from forge.cli.doctor.support_bundle import make_bundle

    finish(lambda: make_bundle(system, settings=settings, out=out), "Interrupted.")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="File of the key; an existing key is kept.")],
) -> None:
    """Make a cluster key. It signs every credential; all hosts of a cluster need the same key."""
    from forge.runtime.security.tokens import Keyring

    Keyring.generate(path)


@model_app.command("init")
def model_init(
    name: Annotated[str, typer.Argument(help="Only tiny is made here.")] = "tiny",
    seed: Seed = 0,
    root: Root = Path(".forge"),
) -> None:
    """Make the tiny model's starting weights by a supervised warm start (about a minute)."""
    if name != "tiny":
        raise InvalidArgument(f"only tiny is made here; `forge model fetch {name}` gets others")
    _model(name, seed, root)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2, or a hub id.")] = "smollm2",
    root: Root = Path(".forge"),
) -> None:
    """Fetch a model and convert it to a transformers directory."""
    _model(name, 0, root)


@model_app.command("warm-start", context_settings=_PASSED_ON)
def model_warm_start(context: typer.Context) -> None:
    """Train a model on conversations, before training by reward. See --help."""
    require_extra("trainer")
    _become("services.trainer.starting_weights.supervised", context)


@trainer_app.command("plan", context_settings=_PASSED_ON)
def trainer_plan(context: typer.Context) -> None:
    """Estimate the memory of a rank, and name settings that fit. See --help."""
    require_extra("trainer")
    _become("services.trainer.plan", context)


@model_app.command("export")
def model_export(
    source: Annotated[Path, typer.Argument(help="A run directory, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="New directory for the model.")],
) -> None:
    """Write the model of a run: its last published weights, without the state of training.

    The tensors have the names and shapes of the hub; adapters are merged into the weights.
    """
    from forge.cli.local_run.models.model_export import export_model

    exported = export_model(source, out)
    kept = exported.kept
    origin = f" (published {exported.published})" if exported.published != kept.digest else ""
    count = len(kept.tensor_names)
    say(f"{kept.path}: {count} tensors in {kept.dtype}, sha256 {kept.digest}{origin}")
    if exported.note:
        say(f"Names are those of transformers' modules, not of the hub: {exported.note}")


@app.command(context_settings=_PASSED_ON)
def agents(context: typer.Context) -> None:
    """Run agents: lease tasks and start a scaffold or any command for each. See --help."""
    _become("forge.agents", context)


def _become(module: str, context: typer.Context) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])


def _model(name: str, seed: int, root: Path) -> None:
    from forge.cli.local_run.models.models import ensure_model

    async def main() -> None:
        path = await ensure_model(name, seed=seed, root=root)
        say(f"{name}: {path}")

    finish(main, "Interrupted.")


join_lines(app)

if __name__ == "__main__":
    app()
