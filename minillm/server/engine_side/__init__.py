"""The server's part in the engine's process: it passes requests to the engine, and their tokens back.  Lesson 99."""
