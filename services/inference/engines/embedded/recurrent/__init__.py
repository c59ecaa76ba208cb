"""Layers whose state goes from token to token (linear attention, Mamba, short convolutions): where
their states are kept, and the passes over them."""
