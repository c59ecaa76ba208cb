"""The window over the generation queue, its open batch and the shares of domains."""
