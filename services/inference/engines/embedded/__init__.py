"""The embedded engine: any causal LM of transformers, in this process, on CPU or one GPU.

engine.py        the engine of the role both, and the start of each role
prefill_engine.py, decode_engine.py, role_engine.py   the engines of one role, and what they share
wiring.py        their parts, from the options of a worker
prefill.py       the actor that reads prompts
decode.py        the actor that samples, with continuous batching
decode_step.py   one step of it: drafts, a forward pass, accepted tokens
decode_pass.py   the forward pass of a step over slabs
device_pass.py   the forward pass of a step on a GPU, by CUDA graphs
device_drafter.py   drafts on a GPU, by a graph
device_graphs.py, device_rows.py   the capture of graphs, and what goes to them
fused_layers.py  the layers of a model with torch.compile, for these graphs
device_weights.py   one copy of the weights on a GPU
sequences.py     its requests
both.py          the actor that does both, in turn
messages.py      messages of both actors
sampler.py       from logits to tokens, with grammars
model.py         the model: its architecture, its forward pass, its weights
model_head.py    the end of the model: hidden states, logits, draft heads
speculation/     drafts, their grammar masks, and how many of them pay
held_prompts.py  prompts that wait for the fetch of a decode worker
early_reads.py   prompts that a decode worker fetches while they are computed
tensor_bytes.py  tensors as bytes and back

kv/shape.py             the shape of keys and values, and the bytes of one token
kv/attention.py         connects transformers' attention layers to the engine's keys and values
kv/prefix_cache.py      keys and values of cached prefixes
kv/slabs.py             keys and values of running sequences, in slabs by length
kv/shared_prefixes.py   keys and values that running sequences share
kv/decode_attention.py  a decode step's attention over slabs and shared prefixes
kv/extents.py           keys and values of running sequences on a GPU, at fixed addresses
kv/extent_kernels.py    attention over extents, by Triton
kv/device_attention.py  whether those kernels are there and right
"""
