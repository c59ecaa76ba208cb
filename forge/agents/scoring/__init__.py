"""Scores of transcripts: reward functions in worker processes, within limits."""
