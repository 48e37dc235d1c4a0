"""Transformers: embedding, attention, blocks, networks, generation, and sequences that several ranks share."""

from ..feed_forward import FeedForward
from .attention import attention
from .blocks import Attention, TransformerBlock
from .embedding import Embedding, embedding
from .generate import generate
from .networks import GPT, Encoder, Llama
from .rotary import rotary
from .sequence import positions, ranks_per_sequence, row_positions, sequence_length, token_layout

__all__ = [
    "GPT", "Attention", "Embedding", "Encoder", "FeedForward", "Llama", "TransformerBlock", "attention", "embedding",
    "generate", "positions", "ranks_per_sequence", "rotary", "row_positions", "sequence_length", "token_layout",
]  # fmt: skip
