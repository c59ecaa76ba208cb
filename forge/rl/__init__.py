"""Reinforcement learning on merged prefix trees, with torch. Rests on `forge.core` alone.

Floors, each of which imports only what is below: `learner`, `mtp`, `model`, `parallel`, `tree`,
`attention`; `losses` imports none of them, and `config` and `algorithms` import no torch.
"""
