"""Records in LMDB: tables, keys, indexes, the change log, migrations. Imports no other room."""
