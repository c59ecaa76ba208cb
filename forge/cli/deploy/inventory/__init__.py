"""The inventory of a cluster: its file, its hosts, and the services of a host."""
