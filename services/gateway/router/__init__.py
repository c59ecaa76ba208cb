"""Calls to inference routers over kept streams. Imports no other room of the gateway."""
