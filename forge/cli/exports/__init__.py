"""`forge trajectories export`: rows of trajectories, and the files that they are written to.

`command` reads the pool, one module a row format makes the rows, `files` writes them.
"""
