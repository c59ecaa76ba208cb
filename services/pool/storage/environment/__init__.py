"""The LMDB environment of a shard: its files, its transactions, the migrations of its schema."""
