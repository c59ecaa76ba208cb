"""Messages to the actors of one leader's term, by subject; most are to the queue."""
