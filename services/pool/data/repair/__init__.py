"""Repair of records from another copy, and of indexes from records."""
