"""What tests of the console share."""
