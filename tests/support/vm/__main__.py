"""`python -m tests.support.vm <arguments of pytest>`: tests in a virtual machine."""

from __future__ import annotations

import signal
import sys

from tests.support.vm.machine import missing, run_pytest

if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"test-vm: {reason}")
    # Else the first file system would stay in /tmp.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("test-vm: terminated"))
    sys.exit(run_pytest(sys.argv[1:]))
