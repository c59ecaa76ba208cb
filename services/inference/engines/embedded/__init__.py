"""The embedded engine: any causal LM of transformers, in this process, on CPU or one GPU.

engine.py        the engine of the role both, and the start of each role
roles/           the engines of the roles, what they share, and the construction of their parts
family_check.py  compares the engine with transformers for a family of models
prefill.py       the actor that reads prompts; prefill_pass.py and prefill_schedule.py: its passes
decode.py        the actor that samples, with continuous batching
decode_step.py   one step of it: drafts, a forward pass, accepted tokens
decode_pass.py   the forward pass of a step over slabs
device/          the same on a GPU, by CUDA graphs
speculation/     drafts, their grammar masks, and the choice of their number
sequences.py     the requests of a step
messages.py      the messages of both actors
stored_kv.py     keys and values from the KV store
model/           architecture, weights, head and sampler
kv/              keys and values, and the attention over them
metrics.py       its metrics
"""
