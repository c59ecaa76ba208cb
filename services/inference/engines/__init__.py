"""Engines: what runs the model. `base` is the contract; each engine has its own file or package."""
