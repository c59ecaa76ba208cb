"""The model as a policy: forward passes over trees, log-probs, and what a model can do."""
