"""The rules of a shard: what a command changes, what a read returns. Imports `storage` alone."""
