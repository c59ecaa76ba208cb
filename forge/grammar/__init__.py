"""Grammars of answers for llguidance, shared by the gateway, which accepts them, and the engines,
which enforce them. Imports `forge.core` alone."""
