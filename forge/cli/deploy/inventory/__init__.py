"""The inventory of a cluster: its file, its hosts, and what a host can run."""
