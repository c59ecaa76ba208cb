"""What the router learns of a prefix cache: its blocks by chain hash, and their changes."""
