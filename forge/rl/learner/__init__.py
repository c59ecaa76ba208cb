"""The optimizer step: batches, objective, critic, optimizer. Imports every other room."""
