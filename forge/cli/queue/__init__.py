"""`forge queue`: the generation queue, and the submission of tasks to it."""
