"""A prefill or decode instance: an engine, its RPCs and the weights it follows."""
