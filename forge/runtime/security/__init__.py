"""Tokens of processes and people, TLS, and the audit log.

From low to high:

    tokens          signed tokens, and the keys of the cluster that sign them
    tls             TLS between hosts
    audit           one line per change by a person, and per refused call
    bearer          the issued token of a process without the cluster's key
    credentials     the credentials of one process, and the tokens of its calls
    issued_tokens   the record of issued and revoked tokens in etcd
"""
