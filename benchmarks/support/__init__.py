"""What several benchmarks need: processes to measure, load, and clocks."""
