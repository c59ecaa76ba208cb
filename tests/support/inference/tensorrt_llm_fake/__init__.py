"""A strict stand-in for TensorRT-LLM, which needs a GPU: the surface that the adapter uses, alone.

Samples from a real model of transformers on the CPU. Whatever would be wrong in silence in the
library (a parameter object used twice, an abort during a transfer, mixed weights, stale blocks) is
a `Misuse` here. `behaviour` chooses the version and the faults.
"""
