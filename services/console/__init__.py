"""The web console: a page over the public RPCs that shows a running system and steers it."""
