"""The gateway's actors: one per session, one per pool shard."""
