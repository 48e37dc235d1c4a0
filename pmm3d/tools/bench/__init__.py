"""The benchmark of one product."""
