"""Transformers: embeddings, attention on the grid, blocks, and networks made of them."""

from .blocks import Attention, FeedForward, TransformerBlock
from .embedding import Embedding, embedding
from .networks import GPT, Encoder, Llama
from .rotary import rotary

__all__ = ["GPT", "Attention", "Embedding", "Encoder", "FeedForward", "Llama", "TransformerBlock", "embedding",
           "rotary"]  # fmt: skip
