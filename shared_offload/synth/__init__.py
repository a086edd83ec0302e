"""Complete checkpoints of random weights, for tests, benchmarks and the demo."""
