"""Connections of the HTTP listener, and one port for several gateways of a host."""
