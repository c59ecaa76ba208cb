"""The pool shards of a scheduler: calls, membership, and moves of groups between them."""
