"""Data of the pages: reads of the public RPCs, as JSON. No HTTP."""
