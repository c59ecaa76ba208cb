"""The version of the surface."""

__version__ = "1.3.0rc29"
