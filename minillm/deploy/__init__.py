"""Several replicas of an engine behind one server.

Choosing a replica belongs here, and a simulation of it, which need no Ray. HTTP and what an engine does with a request
do not.
"""
