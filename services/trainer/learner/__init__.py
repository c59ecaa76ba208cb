"""The model being trained, on one rank or several. Imports `checkpoint` and `model`."""
