"""Messages of a session, their prefix tree, and the exact tokens that a request continues."""
