"""Names, orders of requests and layouts of memory for the worker's process and vLLM's own.

Imports no vLLM.
"""
