"""The embedded engine: any causal LM of transformers, in this process, on CPU or one GPU.

engine.py    what the service sees of both roles
prefill.py   the actor that reads prompts
decode.py    the actor that samples, with continuous batching
draws.py     from logits to tokens, grammars applied
policy.py    the model: its architecture, its forward pass, its weights
attention.py how transformers' attention layers reach keys and values kept here
kv_cache.py  keys and values of prefixes that may be used again
slabs.py     keys and values of running sequences, in slabs by length
trunks.py    what running sequences share, kept once
step.py      a decode step's attention over slabs and trunks
tensors.py   tensors as bytes and back
"""
