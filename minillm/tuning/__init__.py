"""`minillm build`: launch configurations and options measured for one GPU and one traffic.  Lesson 11."""
