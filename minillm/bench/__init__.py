"""Measuring: workloads, the offline comparison, the load generator, records and drawings.  Lesson 99."""
