"""What the worker's process and vLLM's own both know: names, orders of requests, layouts of memory.

Imports no vLLM.
"""
