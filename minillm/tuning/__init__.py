"""`minillm build`: choose options and kernel launch configurations by measuring them on this GPU.  Lesson 11."""
