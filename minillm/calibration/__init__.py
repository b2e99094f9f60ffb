"""Quantize a model: run it on calibration text, choose scales and codes, save it.  Lessons 05 to 07."""
