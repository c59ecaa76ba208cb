"""The `forge` command: `main` has the commands, each room one group of them.

local_run/    forge run and forge serve: a stack on this machine
status/       forge status, top, targets
queue/        forge queue: submission, pause, drain
pool/         forge pool and forge trajectories
exports/      forge trajectories export
doctor/       forge doctor, forge support-bundle
credentials/  forge token, certs, etcd
deploy/       forge deploy: the hosts of a cluster
weights.py    forge weights

Shared: `options`, `connection` (to a running system), `rundir` (the directory of a run),
`command_exit` (output and exit codes), `finding` (a fault and its remedy).
"""
