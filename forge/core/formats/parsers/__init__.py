"""Parsers that several formats share: tags, blocks of calls, one call, Python's literals."""
