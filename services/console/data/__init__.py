"""What the pages show: reads of the public RPCs, as JSON. No HTTP."""
