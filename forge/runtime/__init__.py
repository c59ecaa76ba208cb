"""Shared by all processes: actors, coordination, gRPC, security, settings, telemetry."""
