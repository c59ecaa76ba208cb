"""New weights in the library: files for all ranks, their update, and a probe of the result."""
