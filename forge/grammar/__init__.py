"""Grammars that an answer is held to, in llguidance's terms, for those who take one and those who
enforce it. Imports `forge.core` alone."""
