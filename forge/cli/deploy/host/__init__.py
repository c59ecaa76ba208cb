"""One host: its present state, its differences from the rendered files, and their installation."""
