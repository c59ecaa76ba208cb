"""All hosts of a cluster, reached by transports: installs, checks and upgrades them."""
