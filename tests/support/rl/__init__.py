"""For tests of forge.rl: tiny models, shapes of trees, several ranks."""
