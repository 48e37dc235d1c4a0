"""Program of the tests: networks of the transformers package with random weights, and their results.

python published.py make FOLDER    writes each network, tokens, and its logits and generated tokens
python published.py read FOLDER    reads networks that pmm3d wrote to FOLDER, and writes their logits
python published.py text FOLDER    reads networks and tokenizers that pmm3d wrote to FOLDER, and continues prompt.txt
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SHARED = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    **IDS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LONG = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LONG: 8}
YARN = {"rope_type": "yarn", "factor": 4.0, LONG: 8, "beta_fast": 2.0, "beta_slow": 0.5}


def scaled(theta=10000.0, **scaling):
    """SHARED with a scaling of the rotary positions."""
    return {**SHARED, "rope_parameters": {"rope_theta": theta, **scaling}}


MADE = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=16, n_embd=24, n_layer=2, n_head=3, **IDS)),
    "gpt2-untied": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=37, n_positions=16, n_embd=24, n_layer=2, n_head=3, n_inner=40, tie_word_embeddings=False, **IDS
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHARED)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHARED, tie_word_embeddings=True, rope_theta=500.0)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHARED, sliding_window=5)),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**scaled(rope_type="linear", factor=3.0))),
    "llama-dynamic": lambda: LlamaForCausalLM(
        LlamaConfig(**{**scaled(rope_type="dynamic", factor=2.0), "max_position_embeddings": 7})
    ),
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**scaled(**YARN, mscale=1.0, mscale_all_dim=0.5))),
    "llama-3": lambda: LlamaForCausalLM(LlamaConfig(**scaled(500.0, **LLAMA3), head_dim=10, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHARED)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**scaled(**YARN), tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHARED, head_dim=8)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**{**scaled(1e6, **YARN), "num_key_value_heads": 1}, head_dim=8, tie_word_embeddings=True)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHARED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SHARED, **EXPERTS, moe_intermediate_size=12, shared_expert_intermediate_size=20, decoder_sparse_step=2
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHARED, **EXPERTS, moe_intermediate_size=12, head_dim=8, norm_topk_prob=True)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHARED, **EXPERTS)),
}


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def make(folder):
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 37, (4, 9))
    np.save(folder / "tokens.npy", tokens)
    for name, build in MADE.items():
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases would otherwise be 0 and 1
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        np.save(folder / f"{name}.npy", logits(model, tokens))
        given = torch.from_numpy(tokens)  # with a mask, because the package ignores the token of padding
        more = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False)
        np.save(folder / f"{name}.generated.npy", more.numpy())


def read(folder):
    tokens = np.load(folder / "tokens.npy")
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            np.save(folder / f"{path.name}.npy", logits(model, tokens))


def text(folder):
    prompt = (folder / "prompt.txt").read_text()
    for path in folder.iterdir():
        if path.is_dir():
            model, coder = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
            given = coder(prompt, return_tensors="pt")
            assert given.input_ids[0].tolist() == [*prompt.encode()]
            made = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)
            (folder / f"{path.name}.txt").write_text(coder.decode(made[0]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "read": read, "text": text}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads of the package delay a normal exit, with some MPIs for minutes
