"""One turn, from request to record. Imports every room but `http`."""
