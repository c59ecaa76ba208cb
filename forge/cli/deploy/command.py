"""`forge deploy`: arguments and output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import INTERRUPTED, finish, say
from forge.cli.options import duration_s
from forge.core.errors import InvalidArgument

if TYPE_CHECKING:
    from forge.cli.deploy.cluster.cluster import Cluster
    from forge.cli.deploy.cluster.upgrade import Journal
    from forge.cli.deploy.render.render import RenderResult

deploy_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a cluster of systemd hosts from one inventory file.",
)
Out = Annotated[Path, typer.Option(help="Directory of `forge deploy render`.")]
HealthLimit = Annotated[
    str, typer.Option(help="Longest wait for an instance to become healthy, e.g. 5m.")
]
DrainLimit = Annotated[
    str, typer.Option(help="Longest wait for work in flight of a drained instance, e.g. 2m.")
]


@deploy_app.command()
def init(
    file: Annotated[Path, typer.Argument(help="New file.")] = Path("cluster.toml"),
) -> None:
    """Write an example of an inventory, with every key and its meaning."""
    example = Path(__file__).with_name("example.toml").read_text()
    try:
        with file.open("x") as new:
            new.write(example)
    except FileExistsError:
        raise InvalidArgument(f"{file} exists; name another file") from None
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from None
    say(f"{file}: name your hosts, then forge deploy render --inventory {file} --out rendered")


@deploy_app.command()
def render(
    inventory: Annotated[Path, typer.Option(help="File of `forge deploy init`.")],
    out: Annotated[
        Path, typer.Option(help="Directory for the hosts' files and the cluster's secrets.")
    ],
    rotate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT", help="Replace all certificates, or all tokens; may be repeated."
        ),
    ] = None,
) -> None:
    """Make units, settings, certificates, passwords and tokens of every host.

    Repeat it after a change of the inventory, after an upgrade of Forge, and once a month: it
    replaces certificates that expire soon, and keeps the rest. --out has the keys of the CA and of
    the cluster: keep it on one trusted computer.
    """
    from importlib import metadata

    from forge.cli.deploy.render.lock import locked
    from forge.cli.deploy.render.render import private_folder
    from forge.cli.deploy.render.render import render as write
    from forge.cli.deploy.render.secrets import ROTATED
    from forge.core.extras import DISTRIBUTION

    for one in rotate or ():
        if one not in ROTATED:
            raise InvalidArgument(f"--rotate {one!r} must be one of {', '.join(ROTATED)}")
    try:
        text = inventory.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", error)
        raise InvalidArgument(f"--inventory {str(inventory)!r}: {reason}") from None
    release = metadata.version(DISTRIBUTION)
    private_folder(out)
    with locked(out):
        report = write(text, out, source=str(inventory), release=release, rotate=rotate or ())
    _show(report)


def _show(report: RenderResult) -> None:
    for line in report.secrets:
        say(line)
    for host, changed in report.changed.items():
        files = report.files.get(host, 0)
        say(f"{host}: {files} files, {len(changed)} changed")
        for path in changed[:8]:
            say(f"    {path}")
        if changed[8:]:
            say(f"    and {len(changed) - 8} more")
    if missing := report.inventory.missing():
        say(f"no host runs: {', '.join(missing)}")


@deploy_app.command()
def apply(
    out: Out,
    drain: DrainLimit = "2m",
    health: HealthLimit = "5m",
    replace_etcd: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Replace etcd's member of a host that lost its disk."),
    ] = None,
) -> None:
    """Install the rendered files on every host, from the computer that rendered them.

    Copies and installs the files, starts etcd, applies its users and roles, records the tokens,
    joins new members of etcd, and starts instances that do not run. Restarts instances that run
    with older files, one after another. Reaches hosts as root by ssh. Repeat it at any time:
    without a change it changes nothing.
    """
    from forge.cli.deploy.cluster.apply import apply as bring

    with _cluster(out, drain=drain, health=health) as cluster:
        bring(cluster, say, lost=replace_etcd or ())
        _show_notes(cluster)


@deploy_app.command()
def upgrade(
    out: Out,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps, and do nothing.")
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Undo an upgrade that is not finished.")
    ] = False,
    drain: DrainLimit = "2m",
    health: HealthLimit = "5m",
) -> None:
    """Roll the rendered release through the cluster, one instance after another.

    Install the release on every host, and render with it, first. The command drains each instance,
    restarts it with the new release and checks it before the next one. The first failure rolls all
    instances back to the previous release, with exit code 1. After an interruption the same command
    continues.
    """
    from forge.cli.deploy.cluster.upgrade import Upgrade

    _leave_link()
    with _cluster(out, drain=drain, health=health) as cluster:
        one = Upgrade(cluster, say)
        journal = one.begun() if rollback else one.plan()
        if dry_run:
            _show_steps(journal)
            return
        if rollback and journal.state == "rolling":
            journal = one.roll_back(journal, "by --rollback")
        try:
            done = one.run(journal)
        except KeyboardInterrupt:
            say(one.interrupted())
            raise typer.Exit(INTERRUPTED) from None
        _show_notes(cluster)
        say(
            f"every instance has release {journal.to}"
            if done
            else f"rolled back to release {journal.before}, which every unit runs; the reason is "
            "above. Mend it, then repeat the command: it begins a new upgrade"
        )
    raise typer.Exit(0 if done or rollback else 1)


def _show_steps(journal: Journal) -> None:
    for number, step in enumerate(journal.steps, start=1):
        state = "done " if number <= journal.done else ""
        say(f"{state}{number}/{len(journal.steps)} {step}")


@deploy_app.command()
def install(
    rollback: Annotated[
        str, typer.Option(metavar="RELEASE", help="Replace this release by the previous one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """On a host: install its rendered files, from /etc/forge/deploy.new or else the present ones.

    Writes files, users and the link of the release, and enables the units. Starts and restarts
    nothing: it prints the units to start and to restart. Stops units that left the inventory,
    except pools and etcd. Repeat it at any time.
    """
    import json
    import sys
    from dataclasses import asdict

    from forge.cli.deploy.host.install import chosen_source
    from forge.cli.deploy.host.install import install as put

    done = put(chosen_source(rollback))
    if as_json:
        sys.stdout.write(f"{json.dumps(asdict(done))}\n")
        return
    for path in done.changed:
        say(path)
    for verb, units in (("start", done.start), ("restart", done.restart)):
        if units:
            say(f"now: systemctl {verb} {' '.join(units)}")
    for unit in done.stopped:
        say(f"{unit} left the inventory: stopped")
    for unit in done.kept:
        say(f"{unit} left the inventory and still runs; move its data before you stop it")


@deploy_app.command()
def check(
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of `forge deploy render`: check all of its hosts."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Rendered files of this host. Default: those installed last."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare this host, or with --out all hosts, with the rendered files.

    Compares files, owners and modes, users, units, release, ports, model, certificates, etcd and
    the clocks of the cluster; prints a remedy for each difference. With --out it reaches the hosts
    by ssh, and names those that did not answer or lack the last render. The exit code is 1 after a
    difference. It changes nothing, and may run beside an upgrade.
    """
    from forge.cli.deploy.check_report import check_all, check_here
    from forge.cli.deploy.host.host import DEPLOYED

    if out is not None and folder is not None:
        raise InvalidArgument("--folder is of this host, and --out of all: name one of them")
    if out is None:
        is_well = check_here(folder or DEPLOYED, as_json=as_json)
    else:
        is_well = check_all(_hosts(out), as_json=as_json)
    raise typer.Exit(0 if is_well else 1)


@deploy_app.command("prepare-etcd")
def prepare_etcd(
    new: Annotated[
        bool, typer.Option("--new", help="The member starts a new cluster, with all others.")
    ] = False,
    join: Annotated[
        str, typer.Option(metavar="NAME=URL,...", help="Members of the cluster that it joins.")
    ] = "",
    finish: Annotated[bool, typer.Option("--finish", help="End it: the member has data.")] = False,
) -> None:
    """On a host: prepare the first start of its member of etcd.

    `apply` runs it. Without it a member that has no data starts no cluster and joins none.
    """
    from forge.cli.deploy.host import etcd_start

    if new + bool(join) + finish != 1:
        raise InvalidArgument("name one of --new, --join and --finish")
    if finish:
        etcd_start.finish()
    else:
        etcd_start.prepare("new" if new else "existing", members=join)


@deploy_app.command()
def bootstrap() -> None:
    """On the first host with etcd: apply users and roles, and record the rendered tokens.

    `apply` and `upgrade` run it. Repeat it at any time.
    """
    from forge.cli.deploy.host.bootstrap import bootstrap as prepare

    async def main() -> None:
        for change in await prepare() or ["nothing to change"]:
            say(change)

    finish(main, "Interrupted.")


@deploy_app.command()
def drain(
    instance: Annotated[str, typer.Argument(help="Id in discovery, see `forge status`.")],
    wait: Annotated[str, typer.Option(help="Longest wait for its work in flight.")] = "0s",
    resume: Annotated[bool, typer.Option("--resume", help="End the drain.")] = False,
) -> None:
    """On a host with the key: send a worker no request, or a runner no rollout, until it restarts.

    Prints how many requests or rollouts still run after the wait.
    """
    from forge.cli.deploy.host.check import connection
    from forge.cli.deploy.host.drain import drain_instance
    from forge.cli.deploy.host.host import DEPLOYED, HostDirectory

    at = connection(HostDirectory(folder=DEPLOYED).manifest())
    wait_s = duration_s("wait", wait) or 0.0

    async def main() -> None:
        say(await drain_instance(at, instance, resume=resume, wait_s=wait_s))

    finish(main, "Interrupted.")


def _show_notes(cluster: Cluster) -> None:
    for note in cluster.notes:
        say(note)


@contextmanager
def _cluster(out: Path, *, drain: str, health: str) -> Iterator[Cluster]:
    """Yield the hosts of a rendered cluster; one command at a time changes them."""
    from forge.cli.deploy.render.lock import locked

    try:
        with locked(out):
            yield _hosts(out, drain=drain, health=health)
    except KeyboardInterrupt:
        say("interrupted: the last command may still run on its host; repeat this one")
        raise typer.Exit(INTERRUPTED) from None


def _hosts(out: Path, *, drain: str = "0s", health: str = "5m") -> Cluster:
    from forge.cli.deploy.cluster.cluster import HEALTHY_S, Cluster
    from forge.cli.deploy.cluster.transport import transport_for
    from forge.cli.deploy.render.render import rendered_hosts, rendered_inventory

    logins = {host.name: host.login for host in rendered_inventory(out).hosts}
    return Cluster(
        out=out,
        manifests=rendered_hosts(out),
        transports={host: transport_for(login) for host, login in logins.items()},
        drain_s=duration_s("drain", drain) or 0.0,
        healthy_s=duration_s("health", health) or HEALTHY_S,
    )


def _leave_link() -> None:
    """Continue by the release's own path: on a host of the cluster the link changes meanwhile, and
    with it every module that is imported later."""
    import os
    import sys

    prefix = Path(sys.prefix)
    if prefix.resolve() != prefix:
        program = str(prefix.resolve() / "bin/python")
        os.execv(program, [program, "-m", "forge.cli.main", *sys.argv[1:]])
