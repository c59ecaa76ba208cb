"""The weights of a worker: announced, fetched from other workers or the trainer, swapped in."""
