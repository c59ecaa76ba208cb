"""For tests of the trainer: learners, a real process, and stand-ins for all around it."""
