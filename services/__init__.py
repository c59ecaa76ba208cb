"""The deployables: each package is one kind of process."""
