"""An inference service whose answers stop while a file says so.

`python -m tests.support.inference.held_worker` is `python -m services.inference`; the file `hold`
is beside its `--log-file`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.support.inference import table_engine
from tests.support.inference.held_answers import HoldFile, stopping

if __name__ == "__main__":
    log_file = Path(sys.argv[sys.argv.index("--log-file") + 1])
    hold_file = HoldFile(log_file.with_name("hold"))
    table_engine.holds = hold_file.holds
    with stopping(hold_file.holds):
        runpy.run_module("services.inference", run_name="__main__", alter_sys=True)
