"""`forge status`, `forge top` and `forge targets`: the state of a running system."""
