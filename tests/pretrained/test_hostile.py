"""Hostile and broken checkpoint folders: one clear line, exit code 2, in little time and memory."""

import base64
import contextlib
import io
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.cli import main
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models.gpt import GPT, GPTConfig
from regard.pretrained.folder import export_weights
from regard.pretrained.image_processor import read_processor
from regard.pretrained.tokenizer_files import read_tokenizers

SECONDS = 10
BYTES = 2**30
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁a"]
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {"id": n, "content": name, "special": True} for n, name in enumerate(PIECES[:3])
    ],
    "normalizer": {"type": "Prepend", "prepend": "▁"},
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "ByteFallback"},
    "model": {
        "type": "BPE",
        "vocab": {piece: n for n, piece in enumerate(PIECES)},
        "merges": ["▁ a"],
        "byte_fallback": True,
    },
}
# Answers calls one after the other in one process, and tells the time and memory of each.
SERVER = """
import io, json, re, resource, sys, time
from contextlib import redirect_stderr, redirect_stdout
from regard.cli import main
import regard.api, regard.pretrained.tokenizer_folder, torch
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
limit = status("VmSize") + {most}  # so that not even an attempt takes more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    open("/proc/self/clear_refs", "w").write("5")  # forget the highest use of memory so far
    told, start = io.StringIO(), time.process_time()
    with redirect_stderr(told), redirect_stdout(told):
        code = main(json.loads(line))
    used = time.process_time() - start  # whatever else the machine does
    print(json.dumps([code, told.getvalue(), used, status("VmHWM")]), file=answers, flush=True)
"""


class Server:
    """A process that runs commands under a limit of memory."""

    def __init__(self) -> None:
        script = SERVER.replace("{most}", str(BYTES))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, *words: str) -> tuple[int, str, float, int]:
        """Return the exit code, what was said, the seconds, and the most memory at any time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 120)
        if not ready:
            self.process.kill()
            raise AssertionError(f"no answer to {' '.join(words)}")
        answer = self.process.stdout.readline()
        assert answer, f"{' '.join(words)} ended the process with {self.process.wait()}"
        return tuple(json.loads(answer))


@pytest.fixture(scope="module")
def server() -> Iterator[list[Server]]:
    """Return the process in a list, so that one that died can be replaced."""
    servers = [Server()]
    yield servers
    servers[0].process.kill()
    servers[0].process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a sound checkpoint of a small LLaMA, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    block = BlockConfig(16, 2, 24, norm="rms", feed_forward="swiglu", bias=False, dropout=0.0)
    torch.manual_seed(1)
    config = GPTConfig(len(PIECES), 2, block, position="rotary", max_length=64, tie=False)
    told = {"family": "gpt", "task": "language", "imported": {"model_type": "llama"}}
    export_weights(GPT(config), told, read_tokenizers(folder), folder)
    return folder


# ---- what is done to the folder, which is the current one


def put(name: str, content: Any) -> Callable[[], None]:
    """Return what gives a file other content."""

    def spoil() -> None:
        data = content() if callable(content) else content
        data = data if isinstance(data, str | bytes) else json.dumps(data)
        Path(name).write_bytes(data.encode() if isinstance(data, str) else data)

    return spoil


def config(**changes: Any) -> Callable[[], None]:
    """Return what changes config.json."""

    def spoil() -> None:
        path = Path("config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def tokenizer(**changes: Any) -> Callable[[], None]:
    """Return what changes tokenizer.json."""
    return put("tokenizer.json", lambda: TOKENIZER | changes)


def vocabulary(**changes: Any) -> Callable[[], None]:
    """Return what changes the model in tokenizer.json."""
    return tokenizer(model=TOKENIZER["model"] | changes)


def header(change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> Any:
    """Return what changes the header of the weights, or puts another text in its place."""

    def spoil() -> None:
        data = Path(name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        told = json.loads(data[8 : 8 + length])
        made = change(told)
        text = made if isinstance(made, bytes) else json.dumps(told if made is None else made)
        text = text.encode() if isinstance(text, str) else text
        Path(name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[], None]:
    """Return what changes the weights."""

    def spoil() -> None:
        tensors = {name: x.clone() for name, x in load_file("model.safetensors").items()}
        change(tensors)
        save_file(tensors, "model.safetensors", {"format": "pt"})

    return spoil


def shards(change: Callable[[dict[str, Any]], Any] | None = None, also: Any = None) -> Any:
    """Return what cuts the weights into two files with an index, and changes the index."""

    def spoil() -> None:
        tensors = load_file("model.safetensors")
        Path("model.safetensors").unlink()
        names, places = sorted(tensors), {}
        for n, some in enumerate((names[::2], names[1::2]), 1):
            file = f"model-{n:05}-of-00002.safetensors"
            save_file({name: tensors[name] for name in some}, file)
            places |= dict.fromkeys(some, file)
        index = {"weight_map": places}
        if change is not None:
            change(index)
        Path("model.safetensors.index.json").write_text(json.dumps(index))
        if also is not None:
            also()

    return spoil


def only(*spoilers: Callable[[], None]) -> Callable[[], None]:
    """Return what does several things after each other."""

    def spoil() -> None:
        for one in spoilers:
            one()

    return spoil


def gone(*names: str) -> Callable[[], None]:
    """Return what takes files away."""

    def spoil() -> None:
        for name in names:
            Path(name).unlink()

    return spoil


def pipe(name: str) -> Callable[[], None]:
    """Return what puts a pipe in the place of a file, from which nothing ever comes."""

    def spoil() -> None:
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)

    return spoil


def endless(name: str) -> Callable[[], None]:
    """Return what puts a device without end in the place of a file."""

    def spoil() -> None:
        Path(name).unlink(missing_ok=True)
        Path(name).symlink_to("/dev/zero")

    return spoil


def cut(name: str, share: float) -> Callable[[], None]:
    """Return what leaves only the first part of a file."""

    def spoil() -> None:
        data = Path(name).read_bytes()
        Path(name).write_bytes(data[: int(share * len(data))])

    return spoil


def huge_and_hollow() -> None:
    """Describe a model of 10^12 numbers whose weights lie in a file that is all holes."""
    config(vocab_size=10_000_000, hidden_size=100_000)()
    shape = [10_000_000, 100_000]
    size = 4 * shape[0] * shape[1]
    told = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    }
    text = json.dumps(told).encode()
    with open("model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)


def code_beside() -> None:
    """Put code into the folder that its config asks to run."""
    config(auto_map={"AutoModel": "modeling.Evil"}, model_type="evil")()
    Path("modeling.py").write_text("open('was_run', 'w')")


def pickled() -> None:
    """Leave only weights that would run code when they are read."""
    Path("model.safetensors").unlink()
    Path("pytorch_model.bin").write_bytes(b"cbuiltins\nopen\n(S'was_run'\nS'w'\ntR.")


def twice(told: dict[str, Any]) -> bytes:
    name = next(iter(told))
    return json.dumps(told)[:-1].encode() + f', "{name}": {json.dumps(told[name])}}}'.encode()


def tensor(name: str, **changes: Any) -> Callable[[], None]:
    """Return what changes the header's words on a tensor."""
    return header(lambda told: told[name].update(changes))


def fill(name: str, value: float, dtype: torch.dtype) -> Callable[[], None]:
    """Return what writes one wrong number into a weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[3] = value
        tensors[name] = tensors[name].to(dtype)

    return weights(change)


def pieces_without_end() -> bytes:
    return b"\x0a\x00" * 8_000_000


def map_outside() -> str:
    units = struct.pack("<I", 0xFFFFFFFF & (0x1FFFFF << 10)) * 256
    return base64.b64encode(struct.pack("<I", len(units)) + units + b"a\0").decode()


NORM = "model.norm.weight"
HEAD = "lm_head.weight"
DEEP = "[" * 100_000
FIRST = "model-00001-of-00002.safetensors"
MANY = {piece: n for n, piece in enumerate([*PIECES, *(f"x{n}" for n in range(99))])}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}

# what is spoilt, and what the one line must say
TABLE: dict[str, tuple[Callable[[], None], str]] = {
    # the header of the weights
    "a tensor is there twice": (header(twice), "duplicate field"),
    "tensors overlap": (tensor(NORM, data_offsets=[0, 64]), "invalid offset"),
    "tensors leave a gap": (header(lambda told: told.pop(HEAD) and None), "invalid offset"),
    "a shape of 2^60": (tensor(NORM, shape=[2**60]), "overflow"),
    "a shape that overflows": (tensor(NORM, shape=[2**40, 2**40]), "overflow"),
    "a shape beyond 64 bits": (tensor(NORM, shape=[2**90]), "invalid type"),
    "a negative shape": (tensor(NORM, shape=[-16]), "invalid value"),
    "a shape of many axes": (tensor(NORM, shape=[1] * 99), "invalid shape"),
    "a shape of letters": (tensor(NORM, shape="16"), "invalid type"),
    "a place of letters": (tensor(NORM, data_offsets=["0", "64"]), "invalid type"),
    "a place that ends before it begins": (tensor(NORM, data_offsets=[64, 0]), "invalid offset"),
    "a place outside of the file": (
        tensor(NORM, data_offsets=[2**40, 2**40 + 64]),
        "invalid offset",
    ),
    "an unknown dtype": (tensor(NORM, dtype="F99"), "unknown variant `F99`"),
    "a tensor without a dtype": (
        header(lambda t: t[NORM].pop("dtype") and None),
        "missing field `dtype`",
    ),
    "a header that is no JSON": (header(lambda told: b"{" * 100), "damaged or cut short"),
    "a header that is a list": (header(lambda told: [1, 2]), "invalid type: sequence"),
    "a header nested without end": (header(lambda told: DEEP.encode()), "damaged or cut short"),
    "a header that is no text": (header(lambda told: b"\xff\xfe" * 50), "damaged or cut short"),
    "a header of millions of values": (header(lambda told: b"[" + b"[]," * 4_000_000), "values"),
    "a header of 100 MB": (header(lambda told: b" " * 10**8), "over 32 MB"),
    "a name that moves the cursor": (
        header(lambda told: told.update({"a\x1b[2Jb": told.pop(NORM)})),
        "a tensor is named 'a\\x1b[2Jb'",
    ),
    "a name of 10 MB": (header(lambda t: t.update({"x" * 10**7: t.pop(NORM)})), "is named 'xxx"),
    "a header longer than the file": (put("model.safetensors", b"\xff" * 7 + b"\0}"), "a header"),
    "a header of 2^63 bytes": (put("model.safetensors", b"\xff" * 8 + b"{}"), "a header of"),
    "weights that are cut short": (cut("model.safetensors", 0.6), "not fully covered"),
    "weights with more at the end": (
        lambda: put("model.safetensors", Path("model.safetensors").read_bytes() + b"x")(),
        "not fully covered",
    ),
    "empty weights": (put("model.safetensors", b""), "header too small"),
    # the weights
    "a weight that is not a number": (
        fill(NORM, float("nan"), torch.float32),
        f"{NORM} holds NaN",
    ),
    "an infinite weight in few bits": (fill(HEAD, float("inf"), torch.bfloat16), f"{HEAD} holds"),
    "a number too large for its bits": (fill(HEAD, 1e30, torch.float16), f"{HEAD} holds"),
    "a weight in 8 bits": (
        weights(lambda t: t.update({HEAD: t[HEAD].to(torch.int8)})),
        f"{HEAD} is I8",
    ),
    "a weight too few": (weights(lambda t: t.pop(NORM)), f"missing {NORM}"),
    "a weight too many": (weights(lambda t: t.update(spy=torch.ones(3))), "unknown spy"),
    "a weight of another shape": (
        weights(lambda t: t.update({NORM: torch.ones(17)})),
        f"{NORM} is [17], not [16]",
    ),
    "three things at once": (
        weights(lambda t: t.update({NORM: torch.ones(17), "spy": t.pop(HEAD)})),
        f"missing {HEAD}; unknown spy; {NORM} is [17]",
    ),
    # the files of weights
    "no weights": (gone("model.safetensors"), "no weights; expected model.safetensors"),
    "only pickled weights": (pickled, "it names open, which is not part of a state dict"),
    "a folder for weights": (
        only(gone("model.safetensors"), lambda: os.mkdir("model.safetensors")),
        "not a file",
    ),
    "a pipe for weights": (pipe("model.safetensors"), "not a file"),
    "a device for weights": (endless("model.safetensors"), "not a file"),
    "a hollow file of 4 TB": (huge_and_hollow, "its weights take"),
    "an index that leads outside": (
        shards(lambda index: index["weight_map"].update({NORM: "../../x"})),
        "is in '../../x'; expected the name of a .safetensors file",
    ),
    "an index that leads up and down": (
        shards(lambda index: index["weight_map"].update({NORM: "../m/model.safetensors"})),
        "is in '../m/model.safetensors'",
    ),
    "an index of an absolute path": (
        shards(lambda index: index["weight_map"].update({NORM: "/etc/passwd"})),
        "is in '/etc/passwd'",
    ),
    "an index of a pickled file": (
        shards(lambda index: index["weight_map"].update({NORM: "x.bin"})),
        "is in 'x.bin'",
    ),
    "an index of a number": (
        shards(lambda index: index["weight_map"].update({NORM: 7})),
        "is in 7",
    ),
    "an index without a map": (shards(lambda index: index.clear()), "no weight_map"),
    "an index of many files": (
        shards(lambda i: i["weight_map"].update({f"{n}": f"{n}.safetensors" for n in range(2000)})),
        "files; expected at most 1000",
    ),
    "an index that is no JSON": (
        shards(also=put("model.safetensors.index.json", "{")),
        "not JSON",
    ),
    "a shard that is missing": (shards(also=gone(FIRST)), f"{FIRST}: no such file, but"),
    "a shard that is cut short": (shards(also=cut(FIRST, 0.7)), f"{FIRST}: damaged or cut short"),
    "a shard without a weight": (
        shards(lambda index: index["weight_map"].update({"spy": FIRST})),
        f"{FIRST}: no 'spy', but",
    ),
    "a weight in two shards": (
        shards(also=lambda: shutil.copy(FIRST, "model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors: no",
    ),
    # config.json
    "no config": (gone("config.json"), "no config.json, so there is no model"),
    "a config that is no JSON": (put("config.json", "{"), "config.json: not JSON"),
    "a config that is a list": (put("config.json", "[]"), "expected a JSON object"),
    "a config nested without end": (put("config.json", DEEP), "config.json: not JSON"),
    "a config of 50 MB": (put("config.json", lambda: " " * 50_000_000), "over 16 MB"),
    "a config of millions of values": (
        put("config.json", lambda: '{"a": [' + "[]," * 5_000_000),
        "over 6,000,000 values",
    ),
    "a pipe for a config": (pipe("config.json"), "config.json: not a file"),
    "an unknown model_type": (config(model_type="llamma"), "unknown model_type 'llamma'"),
    "a strange model_type": (config(model_type=["llama"]), "names no model"),
    "code that asks to be run": (code_beside, "unknown model_type 'evil'"),
    "an unknown architecture": (
        config(architectures=["EvilForCausalLM"]),
        "architectures=['EvilForCausalLM']; known for llama are",
    ),
    "a width of 2^60": (config(hidden_size=2**60), "1152921504606846976 is too large"),
    "a billion layers": (config(num_hidden_layers=10**9), "1000000000 is too large"),
    "a vocabulary of 10^18": (config(vocab_size=10**18), "1000000000000000000 is too large"),
    "more width than weights": (config(hidden_size=2**16), "do not fit the config"),
    "a layer more than weights": (config(num_hidden_layers=3), "missing model.layers.2."),
    "many layers more than weights": (config(num_hidden_layers=1000), "1,000 layers are too many"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads=0"),
    "heads that do not divide": (config(num_attention_heads=6, head_dim=None), "heads"),
    "a width in words": (config(hidden_size="wide"), "hidden_size='wide'"),
    "a width that is a list": (config(hidden_size=[16]), "hidden_size=[16]"),
    "an epsilon that is no number": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "an unknown activation": (config(hidden_act="boom"), "boom"),
    "positions that are stretched strangely": (
        config(rope_parameters={"rope_type": "boom", "rope_theta": 1.0}),
        "boom",
    ),
    # the tokenizer
    "no tokenizer": (gone("tokenizer.json"), "no tokenizer; expected tokenizer.json"),
    "a tokenizer that is no JSON": (put("tokenizer.json", "{"), "tokenizer.json: not JSON"),
    "a tokenizer nested without end": (put("tokenizer.json", DEEP), "tokenizer.json: not JSON"),
    "a tokenizer of 50 MB": (put("tokenizer.json", lambda: " " * 50_000_000), "over 40 MB"),
    "a tokenizer of millions of values": (
        put("tokenizer.json", lambda: '{"model": [' + "[]," * 9_000_000),
        "over 6,000,000 values",
    ),
    "a pipe for a tokenizer": (pipe("tokenizer.json"), "tokenizer.json: not a file"),
    "a device for a tokenizer": (endless("tokenizer.json"), "tokenizer.json: not a file"),
    "an expression that takes forever": (
        tokenizer(pre_tokenizer=SPLIT | {"pattern": {"Regex": "(a|a)*$"}}),
        "the expression '(a|a)*$' is not among those known to be harmless",
    ),
    "another in a decoder": (
        tokenizer(decoder=DOUBLE | {"pattern": {"Regex": "(.*a){20}"}}),
        "the expression '(.*a){20}'",
    ),
    "texts that grow without end": (
        tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLE] * 30}),
        "times as long",
    ),
    "an unknown part": (tokenizer(normalizer={"type": "Eval"}), "a normalizer of type 'Eval'"),
    "an unknown frame": (tokenizer(post_processor={"type": "Eval"}), "post_processor of type"),
    "an unknown kind": (vocabulary(type="Neural"), "a model of type 'Neural'"),
    "a map that leads outside": (
        tokenizer(
            normalizer={"type": "Precompiled", "precompiled_charsmap": map_outside()},
        ),
        "a character map that leads outside",
    ),
    "more pieces than rows": (
        vocabulary(vocab=MANY),
        f"the tokenizer has {len(MANY)} pieces, the model only {len(PIECES)}",
    ),
    "half a million pieces more than rows": (
        vocabulary(vocab={f"x{n}": n for n in range(500_000)}, merges=[], byte_fallback=False),
        f"the tokenizer has 500003 pieces, the model only {len(PIECES)}",
    ),
    "an id of 2^40": (vocabulary(vocab={"a": 2**40}), "the id 1099511627776"),
    "a negative id": (vocabulary(vocab={"a": -1}), "the id -1"),
    "an id for two": (vocabulary(vocab={"a": 0, "b": 0}), "have the same id"),
    "a merge of nothing": (vocabulary(merges=["z z"]), "joins something that is not a piece"),
    "a merge to nothing": (vocabulary(merges=["a a"]), "does not give a piece"),
    "half a character": (vocabulary(vocab={"\ud800": 0}, merges=[]), "half a character"),
    "an added token far away": (
        tokenizer(added_tokens=[{"id": 10**6 - 1, "content": "x"}]),
        f"the tokenizer has {len(PIECES) + 1} pieces",
    ),
    "an escape in a name": (
        config(model_type="\x1b[31mllama\x1b]0;x\x07"),
        r"unknown model_type '\x1b[31mllama\x1b]0;x\x07'",
    ),
    "half a character in a name": (config(model_type="a\udc80"), r"model_type 'a\udc80'"),
    "a mark that turns the text": (config(hidden_act="\u202eulis"), r"\u202eulis"),
    "a name of many letters": (config(model_type="a" * 10**6), f"'{'a' * 60}'; choose"),
    "a number of many digits": (config(hidden_size=10**400), "a number of 401 digits"),
    "levels upon levels": (config(x=json.loads("[" * 500 + "]" * 500)), "over 100 levels deep"),
    "settings that are a list": (put("tokenizer_config.json", "[]"), "expected a JSON object"),
    "a vocab.txt that is no text": (
        only(gone("tokenizer.json"), put("vocab.txt", b"\xff\xfe\0a\n")),
        "vocab.txt: not UTF-8",
    ),
    "a vocab.txt without an unknown piece": (
        only(gone("tokenizer.json"), put("vocab.txt", "a\nb\n")),
        "unk_token '[UNK]' is not in its vocabulary",
    ),
    "a SentencePiece file of noise": (
        only(gone("tokenizer.json"), put("spiece.model", b"\x99" * 1000)),
        "spiece.model: not a SentencePiece model",
    ),
    "a SentencePiece file of empty pieces": (
        only(gone("tokenizer.json"), put("spiece.model", pieces_without_end)),
        "spiece.model: the piece ''",
    ),
}


def all_files(folder: Path) -> dict[str, tuple[int, float]]:
    """Return every file with its size and the time of its last change."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (state.st_size, state.st_mtime) for path, state in found.items()}


def judge(servers: list[Server], words: list[str]) -> str:
    """Run a command that must be refused, and return what it said."""
    if servers[0].process.poll() is not None:
        servers[0] = Server()
    code, told, seconds, peak = servers[0].ask(*words)
    assert code == 2, told
    assert told.startswith("regard: ") and told.count("\n") == 1, told
    assert len(told) < 1000 and told[:-1].isprintable(), told
    assert seconds < SECONDS, f"{seconds:.1f} s"
    assert peak < BYTES, f"{peak >> 20} MB"
    return told


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is told by Linux")
@pytest.mark.parametrize("kind", TABLE)
def test_a_hostile_folder_is_refused_in_one_line(kind, server, model, tmp_path, monkeypatch):
    spoil, message = TABLE[kind]
    folder, out = tmp_path / "m", tmp_path / "new"
    shutil.copytree(model, folder)
    monkeypatch.chdir(folder)
    spoil()
    before = all_files(tmp_path)
    assert message in judge(server, ["import", str(folder), f"out={out}"])
    assert all_files(tmp_path) == before  # nothing is run, written or left behind


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is told by Linux")
def test_a_sound_folder_is_taken(server, model, tmp_path, monkeypatch):
    code, told, _, _ = server[0].ask("import", str(model), f"out={tmp_path / 'new'}")
    assert (code, told) == (0, f"wrote {tmp_path / 'new'}\n")
    shutil.copytree(model, tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    shards()()
    code, told, _, _ = server[0].ask("import", str(tmp_path / "m"), f"out={tmp_path / 'other'}")
    assert code == 0, told
    new, other = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "other"))
    assert all(torch.equal(new[name], other[name]) for name in new)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is told by Linux")
@pytest.mark.parametrize("verb", ["run", "look", "eval", "export"])
def test_every_verb_refuses_a_hostile_folder(verb, server, model, tmp_path, monkeypatch):
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    monkeypatch.chdir(folder)
    tensor(NORM, shape=[2**60])()
    more = {
        "run": ["a"],
        "look": ["a"],
        "eval": ["data=x"],
        "export": ["format=huggingface", f"out={tmp_path / 'new'}"],
    }
    assert "overflow" in judge(server, [verb, str(folder), *more[verb]])


def spoilt_about(**changes: Any) -> Callable[[], None]:
    """Return what changes what an imported tokenizer says beside the library's part."""

    def spoil() -> None:
        path = Path("tokenizer.json")
        told = json.loads(path.read_text())
        told["about"] |= changes
        path.write_text(json.dumps(told))

    return spoil


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is told by Linux")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoilt_about(single=["A", "A"]), "'single' is ['A', 'A']"),
        (spoilt_about(single=[10**9, "A"]), "the id 1000000000"),
        (spoilt_about(single=["A"] * 99), "'single' is"),
        (spoilt_about(types=[0]), "'types' are [0]"),
        (spoilt_about(specials={"bos": -1}), "the id -1"),
        (spoilt_about(specials={"boss": 1}), "'specials' are"),
        (spoilt_about(specials={"bos": 5000}), "5000"),
        (spoilt_about(names=[1], numbers=[0]), "'names' is not a list"),
        (spoilt_about(names=["a"], numbers=[0]), "numbers"),
        (spoilt_about(names=["\ud800"], numbers=[0]), "half a character in it"),
        (put("generation_config.json", {"rules": [1]}), "'rules' are [1]; expected an object"),
        (cut("tokenizer.json", 0.5), "not JSON"),
    ],
)
def test_an_imported_folder_that_was_tampered_with_is_refused(
    spoil, message, server, model, tmp_path, monkeypatch
):
    folder = tmp_path / "new"
    assert server[0].ask("import", str(model), f"out={folder}")[0] == 0
    (folder / "SHA256SUMS").unlink()  # whoever means harm would write others
    monkeypatch.chdir(folder)
    spoil()
    assert message in judge(server, ["run", str(folder), "a", "temperature=0", "max_length=2"])


@pytest.mark.parametrize("key", ["resample", "size", "image_mean", "rescale_factor", "crop_size"])
def test_preparing_images_is_told_in_words_that_belong_there(key, tmp_path):
    odd = [None, [], {}, [[]], {"height": []}, "x", True, 10**18, -1, 1e308, [10**18] * 3, 0.5]
    for value in odd:
        told = {"do_center_crop": key == "crop_size", key: value}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
        with contextlib.suppress(UsageError):
            made = read_processor(tmp_path, 32, 3)
            assert 0 < made["size"] <= 4096 and isinstance(made["resample"], str)
    for value in (4, 5, [], {}, "x", 0.5):  # Pillow has more ways than we do
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": value}))
        with pytest.raises(UsageError, match="resample=.* is not supported; known are 0 .nearest."):
            read_processor(tmp_path, 32, 3)


def test_only_what_can_be_seen_is_told():
    told = str(UsageError("a\x1b[31m\ud800\u202eb\r\n\tc é 漢 \x9b"))
    assert told == r"a\x1b[31m\ud800\u202eb  c é 漢 \x9b" and told.isprintable()
    assert str(UsageError(told)) == told  # a mistake may quote another
    assert len(str(UsageError("x" * 10**6))) < 4000


OBEYED = "\x1b]0;x\x07\u202e\x9b"  # a window's title, a bell, from right to left, a command


class Screen(io.StringIO):
    """Standard output that is a terminal, or is not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("how", ["terminal", "pipe", "json"])
def test_no_label_or_name_commands_a_terminal(how, tmp_path, monkeypatch):
    rows = [f"text {n}\t{OBEYED}{n % 2}\n" for n in range(40)]
    (tmp_path / f"a{OBEYED}.tsv").write_text("".join([*rows, rows[0]]))
    monkeypatch.setattr(sys, "stdout", Screen(how == "terminal"))
    words = ["doctor", str(tmp_path / f"a{OBEYED}.tsv"), "task=classify"]
    main([*words, *(["--json"] if how == "json" else [])])
    told = sys.stdout.getvalue()
    assert any(mark in told for mark in "\x1b\x07\u202e\x9b") == (how == "pipe")
    assert (r"\u202e" in told) == (how != "pipe")
    assert how != "json" or OBEYED in json.loads(told)["data"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_nobody_waits_for_a_pipe(name, server, model, tmp_path):
    """Neither in a public checkpoint nor in a folder of ours."""
    assert server[0].ask("import", str(model), f"out={tmp_path / 'ours'}")[0] == 0
    shutil.copytree(model, tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        (folder / "SHA256SUMS").unlink(missing_ok=True)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        told = judge(server, ["run", str(folder), "a"])
        assert name in told or "no such file" in told


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by Linux")
def test_chance_finds_nothing_but_mistakes(tmp_path, monkeypatch):
    """A small part of bench/fuzz_folders.py, the same on every run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    fuzz = pytest.importorskip("fuzz_folders")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    only = {"images", "texts", "llama", "t5", "vit"}
    cases = fuzz.sound(tmp_path, only, 1)
    assert fuzz.run(cases, seed=7, count=50, jobs=1, show=False) == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by Linux")
def test_a_case_that_goes_wrong_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    fuzz = pytest.importorskip("fuzz_folders")
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)

    def endless(chance, place):
        while True:
            pass

    def asleep(chance, place):
        time.sleep(60)

    def crash(chance, place):
        os.kill(os.getpid(), 9)

    def loud(chance, place):
        print("regard: \x1b[31m", file=sys.stderr)

    def wrong(chance, place):
        raise TypeError("x")

    for act, told in (
        (endless, "does not end"),
        (asleep, "does not end"),
        (crash, "ended the process with -9"),
        (loud, "not one printable line"),
        (wrong, "TypeError: x"),
    ):
        found = fuzz.run([("it", act)], seed=1, count=2, jobs=1, show=False)
        assert len(found) == 2 and all(told in said for _, _, said in found)
