"""A Llama of two layers with random weights and a tokenizer of its own: `python engine_model.py FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

LAYERS, HIDDEN, INNER, WORDS = 2, 1024, 2816, 4096


def make(folder: Path) -> None:
    """Write it as Hugging Face models are."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w2"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes")
    make(parser.parse_args().folder)
