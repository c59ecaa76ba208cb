"""Load and targets of the gateway benchmarks: mock upstreams, a bare proxy, chat clients."""
