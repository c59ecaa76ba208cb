"""Files of a process: of its owner alone, changed while it runs, of JSON Lines."""
