"""The process that owns the listener: it starts and replaces the engine's process and the workers.  Lesson 99.

What starts, watches, replaces and stops these processes belongs here. What could fail in them does not: HTTP (`worker`)
and the engine (`engine_side`).
"""
