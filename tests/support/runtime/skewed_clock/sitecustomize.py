"""Shifts the wall clock of a process: this folder on PYTHONPATH, and CLOCK_OFFSET_S set.

grpc's core reads the clock itself, in C, and its Python parts compute deadlines for it. Those keep
the true time: on a host whose clock is off both are shifted alike.
"""

import os
import sys
import time
import types

import grpc.aio

_real = time.time
_offset_s = float(os.environ["CLOCK_OFFSET_S"])
_unshifted = types.SimpleNamespace(**vars(time))


def _shifted() -> float:
    return _real() + _offset_s


for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == grpc.__name__ and getattr(_module, "time", None) is time:
        _module.time = _unshifted  # type: ignore[attr-defined]
time.time = _shifted
