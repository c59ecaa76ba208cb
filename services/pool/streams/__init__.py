"""Streams of the pool's RPCs that stay open: appends in, the change log out."""
