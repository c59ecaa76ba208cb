"""The engines of the roles prefill, decode and both, and how their parts are built.

Imports all rooms of the embedded engine.
"""
