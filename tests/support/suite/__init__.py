"""For tests of whole runs, and for the test run itself."""
