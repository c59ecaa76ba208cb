"""External APIs: calls with the operator's key. Imports errors, metrics and settings alone."""
