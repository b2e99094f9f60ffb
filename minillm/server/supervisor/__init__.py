"""The process that owns the listener: it starts and replaces the engine's process and the workers.  Lesson 99."""
