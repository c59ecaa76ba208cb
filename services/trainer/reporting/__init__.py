"""What is reported about a run: its record, its clock, the metrics of a step, other sinks."""
