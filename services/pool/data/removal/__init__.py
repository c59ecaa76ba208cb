"""Removal of records: freed groups, erased tasks, orphans."""
