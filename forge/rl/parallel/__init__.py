"""One tree over several ranks. Imports `tree` and `attention`."""
