"""Tasks: the rules of their fields, and the position in a data set."""
