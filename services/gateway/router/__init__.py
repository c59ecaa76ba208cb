"""Sampling on inference routers over kept streams. Imports no other room but errors and metrics."""
