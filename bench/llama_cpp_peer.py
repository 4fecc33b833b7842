"""llama.cpp by its own batch interface, in an environment of its own (llama-cpp-python, gguf).

    python bench/llama_cpp_peer.py FOLDER float32|int8 THREADS

FOLDER holds a LLaMA in the Hugging Face layout, of which a GGUF file is written (F32 or Q8_0). Keys
and values are cached in F16, which is faster than F32 and changes as few texts. A line of standard
input is {"texts": [[...]], "tokens": n}; the answer is the wall time, the processor time and the
tokens after each text, chosen greedily. It imports nothing of Regard or PyTorch.
"""

import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore
import llama_cpp as llama  # pyright: ignore
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
}
PARTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_weights(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, all of them float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])
    found = {}
    for name, one in about.items():
        if name != "__metadata__":
            start, end = one["data_offsets"]
            part = data[8 + size + start : 8 + size + end]
            found[name] = np.frombuffer(part, "<f4").reshape(one["shape"])
    return found


def write_gguf(folder: Path, out: Path, kind: str) -> None:
    """Write a model as llama.cpp reads it: pairs that are rotated together stand side by side."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    shared = config.get("num_key_value_heads", heads)
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    rope = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    writer.add_rope_freq_base(rope or 10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, x in read_weights(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base in PARTS:
            to = PARTS[base]
        else:
            _, _, layer, inside = base.split(".", 3)
            to = f"blk.{layer}.{NAMES[inside]}"
            for side, count in (("q_proj", heads), ("k_proj", shared)):
                if inside.endswith(side):
                    x = x.reshape(count, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        x = np.ascontiguousarray(x)
        if kind == "int8" and x.ndim == 2:
            quantised = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{to}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{to}.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Writer:
    """A model of llama.cpp that continues texts, as many at once as are given."""

    def __init__(self, path: Path, threads: int):
        llama.llama_backend_init()
        silent = llama.llama_log_callback(lambda *words: None)
        llama.llama_log_set(silent, ctypes.c_void_p(0))
        self.silent, self.threads = silent, threads
        options = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise SystemExit("llama.cpp does not read its own file")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def __call__(self, texts: list[list[int]], tokens: int) -> list[list[int]]:
        """The tokens after each text."""
        options = llama.llama_context_default_params()
        longest = max(map(len, texts)) + tokens
        options.n_ctx = len(texts) * (-(-longest // 256) * 256)
        options.n_batch = options.n_ubatch = max(512, sum(map(len, texts)))
        options.n_seq_max = len(texts)
        options.n_threads = options.n_threads_batch = self.threads
        context = llama.llama_init_from_model(self.model, options)
        batch = llama.llama_batch_init(options.n_batch, 0, 1)
        written: list[list[int]] = [[] for _ in texts]
        rows = [
            (n, at, x, at + 1 == len(ids))
            for n, ids in enumerate(texts)
            for at, x in enumerate(ids)
        ]
        for _ in range(tokens):
            batch.n_tokens = len(rows)
            for i, (n, at, token, last) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, at, 1
                batch.seq_id[i][0], batch.logits[i] = n, last
            if llama.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            following = []
            for i, (n, at, _, last) in enumerate(rows):
                if last:
                    logits = llama.llama_get_logits_ith(context, i)
                    best = int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())
                    written[n].append(best)
                    following.append((n, at + 1, best, True))
            rows = following
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return written


def main() -> None:
    """Serve."""
    folder, kind, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        write_gguf(folder, path, kind)
        writer = Writer(path, threads)
        print(json.dumps(f"llama-cpp-python {llama.__version__}"), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            start, used = time.perf_counter(), time.process_time()
            texts = writer(asked["texts"], asked["tokens"])
            took = time.perf_counter() - start, time.process_time() - used
            print(json.dumps([*took, texts]), flush=True)


if __name__ == "__main__":
    main()
