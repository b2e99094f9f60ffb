"""Benchmarks: workloads, the offline comparison, the load generator, records and plots.  Lesson 99.

What measures speed, and keeps a record of it, belongs here. Measuring a model's quality does not (`evaluate`), and
neither does choosing a configuration (`tuning`).
"""
