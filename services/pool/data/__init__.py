"""The rules of a shard: changes by commands, results of reads. Imports `storage` alone."""
