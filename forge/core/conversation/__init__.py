"""Messages of a session, their prefix tree, and the exact tokens behind a request."""
