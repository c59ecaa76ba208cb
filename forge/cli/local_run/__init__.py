"""`forge run`, `forge serve` and their parts: a stack of processes on this machine.

`training_run` has the commands, `preflight` the checks of the host, `stack` the processes,
`campaign` the phases of a run, `display` its steps.
"""
