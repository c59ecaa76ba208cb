"""One request, from admission to its last token: its attempts and their calls to workers."""
