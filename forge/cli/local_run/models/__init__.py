"""The models of a stack on this machine: at the start, beside the policy, and kept at the end."""
