"""Launchers of a rollout's program: on the host, in bubblewrap, or in a container.

`base` has the interface. It imports the sandbox, control groups and children of `forge.agents`;
`forge.agents.scaffolds.command` uses it.
"""
