"""The benchmark of one product: measured, printed, drawn."""
