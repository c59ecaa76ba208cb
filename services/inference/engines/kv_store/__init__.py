"""Keys and values that the workers of a model share through a directory."""
