"""What the lessons need beside the engine: the doctor, and what turns sources into notebooks."""
