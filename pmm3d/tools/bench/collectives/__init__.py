"""The benchmark of the collectives: every way of doing each, beside MPI's own and a parameter server."""
