"""`forge doctor` and `forge support-bundle`: checks of a host and a cluster, and their report."""
