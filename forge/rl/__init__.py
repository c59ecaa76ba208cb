"""Reinforcement learning on prefix trees, with torch. Imports `forge.core` alone.

Layers, each imports only those to its right: `learner`, `mtp`, `model`, `parallel`, `tree`,
`attention`. `losses` imports none of them; `config` and `algorithms` import no torch.
"""
