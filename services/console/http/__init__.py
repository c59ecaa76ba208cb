"""The HTTP side: access, pages, live events. May import `data`."""
