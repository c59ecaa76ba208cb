"""Code in vLLM's own processes, which import it by the names in `exchange.names`.

The worker's process does not import it: vLLM's classes that it changes belong to the model. What
both sides know is in `exchange`.
"""
