"""The real scheduler on simulated time: iterations take what a latency model says. No weights, no workers."""
