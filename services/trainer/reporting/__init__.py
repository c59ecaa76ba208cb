"""Reports of a run: its record, its clock, the metrics of a step, and sinks of metrics."""
