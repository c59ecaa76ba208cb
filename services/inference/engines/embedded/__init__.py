"""The embedded engine: any causal LM of transformers, in this process, on CPU or one GPU.

engine.py        what the service sees of both roles
prefill.py       the actor that reads prompts
decode.py        the actor that samples, with continuous batching
messages.py      messages that both actors take
sampler.py       from logits to tokens, grammars applied
model.py         the model: its architecture, its forward pass, its weights
held_prompts.py  prompts that no decode worker has fetched yet
tensor_bytes.py  tensors as bytes and back

kv/shape.py             the shape of keys and values, and the bytes of one token
kv/attention.py         how transformers' attention layers reach keys and values kept here
kv/prefix_cache.py      keys and values of prefixes that may be used again
kv/slabs.py             keys and values of running sequences, in slabs by length
kv/shared_prefixes.py   keys and values that running sequences share, kept once
kv/decode_attention.py  a decode step's attention over slabs and shared prefixes
"""
