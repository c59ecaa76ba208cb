"""The workers as one router knows them: abilities, versions, load, rates and caches."""
