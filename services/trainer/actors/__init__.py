"""The trainer's actors: the order of training, the learner, the writer of checkpoints."""
