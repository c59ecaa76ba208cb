"""Run the trainer: `python -m services.trainer --help`."""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from forge.core.errors import ForgeError
from forge.core.extras import require_extra
from forge.rl.device import device_of
from forge.runtime.process.startup import CANNOT_START, run
from forge.runtime.security.bearer import Bearer
from forge.runtime.settings.reader import load
from services.trainer.config import TrainerConfig
from services.trainer.torchrun_rank import report_failure, under_torchrun


def load_app() -> type:
    """Import the app, and torch with it, only after the settings are valid."""
    from services.trainer.app import TrainerApp

    return TrainerApp


def host_checks(config: TrainerConfig) -> Iterator[Callable[[], object]]:
    """Models, tasks, output files, and the packages that some settings need."""
    from forge.runtime.process.host_check import require_model, require_writable

    yield lambda: require_model("model_path", config.model_path)
    yield lambda: require_model("reference_path", config.reference_path)
    yield lambda: require_model("teacher_path", config.teacher_path)
    if (Path(config.model_path) / "config.json").is_file():
        yield lambda: _check_family(config.model_path)
    yield lambda: require_writable("checkpoint.dir", config.checkpoint.dir)
    yield lambda: require_writable("metrics_file", config.metrics_file)
    yield lambda: require_writable("tensorboard_dir", config.tensorboard_dir)
    yield lambda: require_writable("weights_dir", config.weights_dir)
    if config.rank_token_file:
        yield partial(Bearer, file=config.rank_token_file, setting="rank_token_file")
    if config.evaluation.tasks:
        yield partial(_read_tasks, config.evaluation.tasks)
    if config.device != "cpu":
        yield partial(device_of, config.device)
    needs = {
        "lora": config.lora.rank,
        "adamw8bit": config.optimizer.name == "adamw_8bit",
        "tensorboard": config.tensorboard_dir,
    }
    for extra, needed in needs.items():
        if needed:
            yield partial(require_extra, extra)


def _check_family(model_path: str) -> None:
    from services.trainer.model.full_weights import check_family

    check_family(model_path)


def _read_tasks(file: str) -> None:
    from forge.client.task_files import read_tasks
    from services.trainer.evaluation import DEFAULTS

    read_tasks(Path(file), DEFAULTS)


def follow() -> None:
    """Run a rank above 0, which serves nothing: it takes the steps that rank 0 orders.

    Exit codes as those of `run`, and 0 when the group ends.
    """
    try:
        config = load(TrainerConfig, service="trainer", argv=sys.argv[1:], environ=os.environ)
        from services.trainer.learner.rank_processes import follow_torchrun

        follow_torchrun(config)
    except ForgeError as error:
        report_failure(str(error))
        sys.stderr.write(f"forge trainer: {error}\n")
        sys.exit(CANNOT_START)


def end(main: Callable[[], object]) -> NoReturn:
    """Run to the end of the process, without the destructors of torch: those of a group wait for
    ranks that are gone, and torchrun for this process."""
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve = partial(run, "trainer", TrainerConfig, load_app, host_checks, on_error=report_failure)
    if under_torchrun():
        end(serve if os.environ["RANK"] == "0" else follow)
    serve()
