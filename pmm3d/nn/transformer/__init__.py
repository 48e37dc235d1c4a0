"""Transformers: embedding, attention, blocks and networks on the grid, and sequences that several ranks share."""

from .sequence import positions, ranks_per_sequence, row_positions, sequence_length, token_layout

__all__ = ["positions", "ranks_per_sequence", "row_positions", "sequence_length", "token_layout"]
