"""How a test tells the scripted engine, through any client, what to say; imports nothing."""


def scripted(task: str, *steps: str) -> str:
    """A task whose `steps` the model will say, one in each turn."""
    return f"{task} STEPS[[{'|||'.join(steps)}]]"
