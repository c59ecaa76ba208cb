"""Engines: what runs the model. `base` is the contract; each engine has its own file or package.

Imports no other room of the service.
"""
