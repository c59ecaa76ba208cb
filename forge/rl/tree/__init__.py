"""A merged tree as tensors, cut into parts, and the passes over them. Imports `attention`."""
