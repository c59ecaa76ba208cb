"""Why the code of a model fails in the engine, without Python's own text, which says nothing to an
operator."""

from __future__ import annotations

import traceback
from pathlib import Path

from forge.rl.model.capabilities import one_line
from forge.runtime.telemetry import log


def reason_of(error: BaseException) -> str:
    """One line: what the model lacks, and the place in its code. The log has the text."""
    log.debug("model_pass_failed", error=one_line(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name.startswith("modeling_")]
    place = (own or frames)[-1]
    where = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
    if "kv_pass" in str(error):
        return f"its layers do not hand the engine's arguments on to their attention ({where})"
    if not own:
        return f"its pass gives something else than the engine asks for ({where})"
    return f"its layers fail without a cache of transformers or on packed sequences ({where})"
