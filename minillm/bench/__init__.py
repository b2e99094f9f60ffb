"""Benchmarks: workloads, the offline comparison, the load generator, records and plots.  Lesson 99."""
