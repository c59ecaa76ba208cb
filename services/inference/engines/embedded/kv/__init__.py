"""Keys and values of the embedded engine, and the attention over them.

shape.py             the shape of keys and values, and the bytes of one token
fitting.py           one shape for attention layers of any numbers and shapes
attention.py         connects transformers' attention layers to the engine's keys and values
prefix_cache.py      keys and values of cached prefixes
slabs.py             keys and values of running sequences, in slabs by length
shared_prefixes.py   keys and values that running sequences share
decode_attention.py  a decode step's attention over slabs and shared prefixes
cached_states.py     cached states of recurrent layers
state_rows.py        states of running sequences
state_memory.py      divides the memory between states and keys and values
extents.py           keys and values of running sequences on a GPU, at fixed addresses
extent_kernels.py    attention over extents, by Triton
device_attention.py  decides whether these kernels exist and compute the right values
"""
