"""What every process stands on: actors, coordination, gRPC, security, settings, telemetry."""
