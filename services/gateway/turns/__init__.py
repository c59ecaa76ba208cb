"""One turn from request to record. Imports every room except `http`."""
