"""`minillm build` chooses launch configurations and options by measuring them for a GPU and its traffic.  Lesson 11."""
