"""Programs that make or fetch the weights a run starts from. No service runs them."""
