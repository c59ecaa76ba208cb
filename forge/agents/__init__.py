"""The agent side: a runner that leases rollouts, the scaffolds it can run, and environments."""
