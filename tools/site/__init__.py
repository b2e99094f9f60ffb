"""The parts of the course's site that Jupyter Book does not make: see tools/build_site.py."""
