"""In place of `forge.rl.file_broadcast`: says that it is ready, and freezes at its first order.

With FORGE_TEST_ENDLESS in its environment it reports a byte again and again instead.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

if __name__ == "__main__":
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(b'{"ready": true}')
    if control.recv(1 << 16):
        while "FORGE_TEST_ENDLESS" in os.environ:
            control.send(b'{"received_bytes": 1}')
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
