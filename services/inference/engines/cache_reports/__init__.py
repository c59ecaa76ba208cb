"""Reports of a prefix cache to routers: its blocks by chain hash, and their changes."""
