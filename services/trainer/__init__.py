"""The learner: batches of complete groups in, new weights out.

Floors, each of which imports only what is below: `actors`, `learner`, `reporting`, `checkpoint`,
`model` and `data`. `starting_weights` holds programs of their own.
"""
