"""A cluster of virtual nodes on one machine, for tests and measurements between nodes."""
