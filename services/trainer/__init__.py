"""The trainer: takes batches of complete groups and publishes new weights.

Rooms, each imports only those to its right: `actors`, `leadership` and `learner`, `reporting`,
`published`, `checkpoint`, `model`, `batches`, `samples`. `starting_weights` has separate programs.
"""
