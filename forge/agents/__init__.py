"""The agent side: a runner that leases rollouts, its scaffolds, and environments.

app.py, runner.py   the process, and the leases of its rollouts
attempts.py         one attempt, from the lease to the report
scaffolds/          agents in the runner's process, and `command` for programs
launchers/          starts of a program: bare, in bubblewrap, in a container
sandbox/            containment of programs
environments/       tasks, episodes and scores of the built-in domains
rewards.py          the interface of reward functions; scoring/ runs them
"""
