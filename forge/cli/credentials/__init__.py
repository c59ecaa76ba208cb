"""`forge token`, `forge certs` and `forge etcd`: tokens, certificates, users of etcd."""
