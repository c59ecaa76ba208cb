"""The trainer's ranks of this host as one process.

    python -m services.trainer.torchrun OPTIONS -- SETTINGS

Starts torchrun for a supervisor (`forge run`, systemd). OPTIONS are torchrun's own, SETTINGS those
of the trainer. Wrong settings are refused before any rank starts. The ranks get the time of
`drain_s` to stop; the error of the rank that failed first is one line on stderr. torchrun does not
restart ranks, unless `--max-restarts` says so: the supervisor starts this process again.

Exit codes: 0 after a stop, 1 a rank failed, 2 the settings are wrong.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import sdnotify
from torch.distributed import run as elastic
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from forge.core.errors import ConfigError, ForgeError
from forge.runtime.process.child_processes import dying_with_parent
from forge.runtime.process.startup import CANNOT_START
from forge.runtime.settings.reader import load
from services.trainer.config import TrainerConfig
from services.trainer.host_meeting import NAME, use_meeting
from services.trainer.torchrun_rank import END_S, as_rank

_SEPARATOR = "--"


def main(argv: Sequence[str]) -> int:
    """Run the ranks to their end. Returns the exit code."""
    own, settings = _divided(argv)
    try:
        # Nothing else ends a rank whose torchrun was killed.
        rank = dying_with_parent([sys.executable, "-u", "-m", "services.trainer", *settings])
        options = elastic.parse_args(  # type: ignore[no-untyped-call]
            [*own, "--no-python", *rank]
        )
        config = _checked(options, settings)
    except ForgeError as error:
        return _say(str(error), code=CANNOT_START)
    if options.shutdown_timeout is None:
        options.shutdown_timeout = int(config.drain_s + END_S)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it warns of
    # Hosts have the same number of ranks, so torchrun need not agree on them in its store. There a
    # host that restarts early finds the agreement of the round that is ending; its ranks then wait
    # for the next round, in which the first host waits for an agreement.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    _stand_for_ranks(host=options.node_rank)
    # Its own lines repeat what the ranks log, and what this process says at the end.
    logging.disable(logging.CRITICAL)
    with TemporaryDirectory(prefix="forge-torchrun-") as reports:
        options.log_dir = options.log_dir or reports
        try:
            elastic.run(options)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return _failed(*error.get_first_failure())
        except SignalException:
            return 0
        except Exception as error:  # of the rendezvous: the other hosts may come later
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            return _say(f"the ranks did not meet: {said}", code=1)
    return 0


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    own = [*argv]
    if _SEPARATOR not in own:
        return own, []
    at = own.index(_SEPARATOR)
    return own[:at], own[at + 1 :]


def _checked(options: Any, settings: Sequence[str]) -> TrainerConfig:
    """The settings, valid for the mesh that torchrun makes. Raises `ConfigError`."""
    try:
        fewest, nodes = elastic.parse_min_max_nnodes(options.nnodes)
        here = elastic.determine_local_world_size(options.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    if fewest == nodes:
        with as_rank(ranks=nodes * here, ranks_here=here):
            return load(TrainerConfig, service="trainer", argv=settings, environ=os.environ)
    _check_elastic(options)
    for hosts in range(fewest, nodes + 1):
        with as_rank(ranks=hosts * here, ranks_here=here):
            try:
                config = load(TrainerConfig, service="trainer", argv=settings, environ=os.environ)
            except ForgeError as error:
                raise ConfigError(f"--nnodes {options.nnodes}, {hosts} of them: {error}") from error
    # In torch's own store, a host that joins later waits for an address that the first host stores
    # in its first round alone (torch 2.13). Now rank 0 has a store for the ranks of each round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    use_meeting()
    options.rdzv_backend = NAME
    return config


def _check_elastic(options: Any) -> None:
    """Raises `ConfigError` for options with which hosts of a changing number cannot meet."""
    said = f"--nnodes {options.nnodes} is not allowed "
    if options.rdzv_backend != "c10d":
        raise ConfigError(f"{said}with --rdzv-backend {options.rdzv_backend}; set c10d")
    if not options.rdzv_endpoint:
        raise ConfigError(f"{said}without --rdzv-endpoint: every host would start alone")


def _stand_for_ranks(*, host: int) -> None:
    """Leave systemd's readiness and watchdog to rank 0, or report ready without it."""
    if host == 0:
        os.environ.pop("WATCHDOG_PID", None)
    else:
        sdnotify.SystemdNotifier().notify("READY=1")


def _failed(rank: int, failure: ProcessFailure) -> int:
    if failure.exitcode < 0:
        return _say(f"rank {rank} was killed by {failure.signal_name()}", code=1)
    found = failure.error_file_data.get("message")
    said = found if isinstance(found, str) else f"exit code {failure.exitcode}"
    code = CANNOT_START if failure.exitcode == CANNOT_START else 1
    return _say(f"rank {rank} failed: {said}", code=code)


def _say(text: str, *, code: int) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"forge trainer: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
