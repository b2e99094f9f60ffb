"""Measuring: workloads, the offline comparison, the load generator, records and their drawings.  Lesson 99."""
