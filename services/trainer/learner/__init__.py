"""The model under training, on one rank or several. Imports `checkpoint` and `model`."""
