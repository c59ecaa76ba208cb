"""Programs that create or fetch starting weights of a run. No service runs them."""
