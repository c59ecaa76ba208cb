"""One leader's term, and the standby's copies. Imports `actors` and `state`."""
