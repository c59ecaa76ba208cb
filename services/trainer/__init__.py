"""The trainer: takes batches of complete groups and publishes new weights.

Layers, each imports only those to its right: `actors`, `learner`, `reporting`, `checkpoint`,
`model`, `data`. `starting_weights` holds separate programs.
"""
