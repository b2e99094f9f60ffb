"""Methods that choose codes and scales from calibration data: one file each, without a model.  Lessons 06 and 07."""
