"""TensorRT-LLM as an engine, on NVIDIA GPUs; see docs/tensorrt_llm.md.

provider.py      the target of the entry point
engine.py        the roles, and prompts between prefill and decode
answer.py        one answer, over as many legs as it takes
llm.py           the library's engine: start, legs, weight updates, restart
gate.py          an update is alone with the engine
requests.py      parameters and answers in the library's terms
arguments.py     its constructor's arguments, from the settings
hand_off.py      a hand-off as bytes
cache_events.py  its cache events by chain hashes
watch.py         reads events and statistics
metrics.py       metrics
weights/: new weights
    checkpoint.py        names, types and shapes that a version must have
    own_names.py         names of transformers, and their way to those of the checkpoint
    buckets.py           a weight version as files, two at a time
    weight_update.py     one update of all ranks
    worker_extension.py  takes it, in each of the library's GPU workers
    probe.py             new weights against the trainer's log-probs
library/: the installed library
    library.py       finds, checks and imports it
    surface.py       used classes of each version (surface/), and the features that follow
    surface_diff.py  an installed tree against a surface
doctor/: `forge doctor --engine tensorrt_llm`
    checks.py        its findings
    checklist.py     checks that need a GPU
"""
