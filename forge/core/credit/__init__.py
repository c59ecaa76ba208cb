"""Credit of sampled tokens: rewards, completion time, advantages."""
