"""Laws of recurrent and convolutional translators, and of attention that is drawn."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard.layers.recurrent.attention as recurrent
import regard.models as models
from regard.attention.masks import Padding
from regard.attention.watch import watch
from regard.cli import main
from regard.data.parallel import PairBatch
from regard.errors import UsageError
from regard.layers.recurrent.attention import (
    ATTENTIONS,
    HardAttention,
    LocationAttention,
    ReinforceTape,
)
from regard.layers.recurrent.decoder import CellConfig, RecurrentDecoder, build_cells
from regard.models import preset
from regard.models.convolutional import EncoderLayer, GatedConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.tasks.text.translate import TRANSLATE, hard_attention_loss
from regard.training.loss import sequence_loss
from tests import searching

CELL = CellConfig(8, dropout=0.0)


def close(ours: Tensor, right: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, right, atol=atol, rtol=0)


def enlarged(model: nn.Module) -> nn.Module:
    """Return a model in fp64 whose weights are so large that differences would show."""
    for parameter in model.double().parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def build(vocab: int = 11, **changes) -> Recurrent:
    """Return a small translator in fp64."""
    torch.manual_seed(0)
    direction = changes.pop("direction", "both")
    block = replace(CELL, **changes)
    config = RecurrentConfig(vocab, vocab, block=block, direction=direction, max_length=32)
    return enlarged(Recurrent(config).eval())  # type: ignore[return-value]


# Cells


@pytest.mark.parametrize(("name", "theirs"), [("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)])
def test_a_cell_is_that_of_torch(name: str, theirs: Callable):
    torch.manual_seed(0)
    cell = enlarged(build_cells(replace(CELL, cell=name), 5, 1)[0])
    other = theirs(5, 8, batch_first=True).double()
    other.weight_ih_l0.data, other.weight_hh_l0.data = cell.given.weight.data, cell.past.weight.data
    other.bias_ih_l0.data, other.bias_hh_l0.data = (
        cell.given.bias.data,
        torch.zeros_like(cell.given.bias.data),
    )
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    begin = torch.randn(cell.parts, 1, 3, 8, dtype=torch.float64)
    right, last = other(x, tuple(begin) if name == "lstm" else begin[0])
    ours, state = cell(x, tuple(part[0] for part in begin))
    close(ours, right)
    close(state[0], (last[0] if name == "lstm" else last)[0])


def test_the_encoder_reads_padded_texts_as_torch_reads_packed_ones():
    torch.manual_seed(0)
    config = RecurrentConfig(11, 11, 2, 1, CELL)
    encoder = enlarged(Recurrent(config)).encoder
    other = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True).double()
    for number, layer in enumerate(encoder.layers):
        for end, cell in zip(("", "_reverse"), layer, strict=True):
            place = f"l{number}{end}"
            getattr(other, f"weight_ih_{place}").data = cell.given.weight.data
            getattr(other, f"weight_hh_{place}").data = cell.past.weight.data
            getattr(other, f"bias_ih_{place}").data = cell.given.bias.data
            getattr(other, f"bias_hh_{place}").data.zero_()
    lengths, x = torch.tensor([6, 2, 4]), torch.randn(3, 6, 8, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    out, (last, _) = other(packed)
    right, _ = nn.utils.rnn.pad_packed_sequence(out, True)
    mask = Padding.of(lengths, 6)
    ours = encoder(x, mask)
    for i, n in enumerate(lengths):
        close(ours[i, :n], right[i, :n])
    close(encoder.gist(ours, mask), torch.cat([last[2], last[3]], -1))


# What is written


def loop(model: Recurrent, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits and alignments of one pair by the equations of Bahdanau et al., word by word.

    s_i = f(y_{i-1}, s_{i-1}, c_i), c_i = sum_j a_ij h_j, a_ij = softmax_j v . tanh(W s_{i-1} +
    U h_j), and the larger of each two of U_o s_i + V_o y_{i-1} + C_o c_i.
    """
    width = model.config.block.width

    def read(cell, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(state) == 2:
            h, c = state
            i, f, g, o = (cell.given(x) + cell.past(h)).split(width)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c
        (h,) = state
        if cell.gates == 1:
            return (torch.tanh(cell.given(x) + cell.past(h)),)
        r, u, n = cell.given(x).split(width)
        old_r, old_u, old_n = cell.past(h).split(width)
        u, n = torch.sigmoid(u + old_u), torch.tanh(n + torch.sigmoid(r + old_r) * old_n)
        return (u * h + (1 - u) * n,)

    decoder = model.decoder
    embed = lambda token: decoder.tokens.weight[token] * width**0.5  # noqa: E731
    sides = []
    for cell, words in zip(model.encoder.layers[0], (source, source[::-1]), strict=True):
        state, said = (torch.zeros(width, dtype=torch.float64),) * cell.parts, []
        for word in words:
            state = read(cell, embed(word), state)
            said.append(state[0])
        sides.append(said)
    memory = [torch.cat(pair) for pair in zip(sides[0], sides[1][::-1], strict=True)]
    begun = torch.tanh(decoder.first(torch.cat([sides[0][-1], sides[1][-1]])))
    state = begun.split(width)
    score, readout = decoder.cross.score, decoder.readout
    logits, alignments = [], []
    for word in map(embed, target):
        energies = [score.vector @ torch.tanh(score.query(state[0]) + score.key(h)) for h in memory]
        shares = torch.stack([e.exp() for e in energies])
        shares = shares / shares.sum()
        context = sum(a * h for a, h in zip(shares, memory, strict=True))
        state = read(decoder.cell, torch.cat([word, context]), state)
        both = readout.state(state[0]) + readout.word(word) + readout.context(context)
        best = torch.stack([torch.max(both[i], both[i + width]) for i in range(width)])
        logits.append(model.head(best))
        alignments.append(shares)
    return torch.stack(logits), torch.stack(alignments)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_rnnsearch_is_the_loop_of_the_paper(cell: str):
    model = build(cell=cell)
    source, target = torch.tensor([[3, 7, 4, 9, 2]]), torch.tensor([[1, 5, 8, 6]])
    with torch.no_grad(), watch(model) as maps:
        ours = model(source, target)
        logits, alignments = loop(model, source[0].tolist(), target[0].tolist())
    close(ours[0], logits)
    assert maps.names() == ["decoder.cross"]
    assert maps["decoder.cross"].shape == (1, 1, 4, 5)
    close(maps["decoder.cross"].weights()[0, 0], alignments)
    close(maps["decoder.cross"].weights(rows=[3, 0, 1])[0, 0], alignments[[3, 0, 1]])
    assert alignments.std(0).max() > 0.01  # it does not look at the same for every word


def test_a_second_reading_has_a_map_of_its_own():
    model = build()
    with torch.no_grad(), watch(model) as maps:
        for length in (2, 1, 3):
            model(torch.tensor([[3, 7]]), torch.ones(1, length, dtype=torch.long))
    assert [each.shape[2] for each in maps.calls("decoder.cross")] == [2, 1, 3]


def test_a_fixed_context_is_all_that_is_known_of_the_source():
    model = build(attention="none")
    decoder, target = model.decoder, torch.tensor([[1, 5, 8], [1, 4, 4]])
    gist = torch.randn(2, 16, dtype=torch.float64)
    said = []
    with torch.no_grad():
        for places, context in ((2, gist), (9, gist), (2, gist + 1)):
            memory = torch.randn(2, places, 16, dtype=torch.float64)
            said.append(decoder.read(target, decoder.begin(memory, context=context))[0])
    short, long, other = said
    close(short, long)
    assert (short - other).abs().max() > 0.01


def test_without_a_gist_a_decoder_begins_with_the_mean_of_what_may_be_seen():
    decoder = build(attention="none").decoder
    memory = torch.randn(2, 5, 16, dtype=torch.float64)
    state = decoder.begin(memory, Padding.of(torch.tensor([5, 3]), 5))
    close(state.parts[-1][1], torch.stack([memory[0].mean(0), memory[1, :3].mean(0)]))


def test_location_is_a_bell_around_the_place_that_the_state_names():
    torch.manual_seed(0)
    look = enlarged(LocationAttention(8, 6).eval())
    q, memory = torch.randn(2, 3, 8).double(), torch.randn(2, 7, 6).double()
    lengths = torch.tensor([7, 4])
    mask = Padding.of(lengths, 7)
    with torch.no_grad(), watch(look) as maps:
        look(q, look.read(memory, mask), memory, mask)
        places = lengths.view(2, 1, 1) * look.place(q).sigmoid()
        bell = torch.exp(-0.5 * ((torch.arange(7) - places) * look.sharpness) ** 2)
        bell = bell * (torch.arange(7) < lengths.view(2, 1, 1))
        weights = maps[maps.names()[0]].weights()[:, 0]
    close(weights, bell / bell.sum(-1, keepdim=True))


@pytest.mark.parametrize("order", ["before", "after", "input_feeding"])
@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "none"])
def test_hypotheses_look_at_one_memory(attention: str, order: str):
    torch.manual_seed(0)
    width = 8 if attention == "dot" else 6
    config = replace(CELL, attention=attention, order=order)
    decoder = enlarged(RecurrentDecoder(config, 11, width, 2).eval())
    memory = torch.randn(2, 5, width, dtype=torch.float64)
    mask = Padding.of(torch.tensor([5, 3]), 5)
    texts = torch.randint(0, 11, (6, 4))
    with torch.no_grad():
        state = decoder.begin(memory, mask)
        state.select(torch.zeros(2, 3, dtype=torch.long))
        assert state.memory is memory and state.hypotheses == 3
        ours = torch.cat([decoder.read(part, state)[0] for part in texts.split([1, 3], 1)], 1)
        for i, (one, text) in enumerate(zip(ours, texts, strict=True)):
            n = (5, 3)[i // 3]
            alone = decoder.begin(memory[i // 3 : i // 3 + 1, :n])
            close(one[None], decoder.read(text[None], alone)[0])


# Attention that is drawn


class Forced:
    """ReinforceTape given places, one after the other, and notes how likely they were."""

    def __init__(self, places: list[int]):
        self.places, self.log_probability = list(places), None

    def __call__(self, scores: Tensor) -> Tensor:
        place = self.places.pop(0)
        self.log_probability = scores.log_softmax(-1)[..., place]
        return torch.zeros_like(scores).index_fill(-1, torch.tensor([place]), 1.0)


@pytest.mark.parametrize("order", ["before", "input_feeding"])
def test_the_gradient_of_draws_is_that_of_the_expected_loss(order: str, monkeypatch):
    # over all ways to look at 3 places for 3 words; the draws of the last, padded word don't matter
    model = build(order=order, normalise="sample").train()
    source, target = torch.tensor([[3, 7, 4]]), torch.tensor([[1, 5, 8]])
    writes = torch.tensor([[5, 8, -1]])
    real = writes >= 0
    expected, estimated = torch.zeros((), dtype=torch.float64), []
    chosen = [p for n, p in model.named_parameters() if "baseline" not in n]
    for places in product(range(3), repeat=3):
        forced, draws = Forced(list(places)), ReinforceTape()
        monkeypatch.setattr(recurrent, "Sample", lambda forced=forced: forced)
        logits = model.head(model.hidden(source, target, draws=draws))
        losses = F.cross_entropy(logits[0], writes[0], ignore_index=-1, reduction="none").unsqueeze(
            0
        )
        chance = torch.cat(draws.log_probs, 1).sum().exp()
        expected = expected + chance * losses.sum()
        whole = losses.sum() + draws.loss(losses, real)
        grads = torch.autograd.grad(whole, chosen, retain_graph=True, allow_unused=True)
        estimated.append([chance.detach() * (0.0 if g is None else g) for g in grads])
    right = torch.autograd.grad(expected, chosen)
    for parts, exact in zip(zip(*estimated, strict=True), right, strict=True):
        close(sum(parts), exact)
    names = [n for n, _ in model.named_parameters() if "baseline" not in n]
    score = right[names.index("decoder.cross.score.vector")]
    assert score.abs().max() > 1e-3  # which has no other gradient than that of the draws


def batch(model: Recurrent, lengths: tuple[int, ...] = (5, 3)) -> PairBatch:
    """Return some pairs."""
    rand = torch.Generator().manual_seed(3)
    ids = torch.randint(3, model.config.source_vocab, (3, 2, max(lengths)), generator=rand)
    far = torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)
    return PairBatch(ids[0], torch.tensor(lengths), ids[1], ids[2].masked_fill(far, -1), 8, 16)


@pytest.mark.parametrize("r_drop", [0.0, 1.0])
def test_hard_attention_learns_by_its_draws(r_drop: float):
    model = build(normalise="sample").train()
    torch.manual_seed(5)
    loss = hard_attention_loss(model, batch(model), 0.1, r_drop)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-9 for p in model.parameters())
    torch.manual_seed(5)
    close(loss, sequence_loss(model, batch(model), 0.1, r_drop))  # adds nothing but a gradient


def test_a_soft_model_has_nothing_to_learn_from_draws():
    model = build().train()
    losses = [f(model, batch(model), 0.1, 0.0) for f in (hard_attention_loss, sequence_loss)]
    assert torch.equal(*losses)


def test_the_baseline_learns_what_loss_to_expect():
    torch.manual_seed(0)
    hard = HardAttention(4).train()
    optimiser = torch.optim.Adam(hard.parameters(), lr=0.1)
    q = torch.randn(2, 2, 4)
    losses = torch.tensor([[2.0, 1.0], [4.0, 0.0]])
    for _ in range(500):
        draws = ReinforceTape()
        hard(q, draws)(torch.zeros(2, 1, 2, 3))
        optimiser.zero_grad()
        draws.loss(losses).backward()
        optimiser.step()
    close(hard.baseline(q).squeeze(-1).detach(), torch.tensor([[3.0, 1.0], [4.0, 0.0]]), 0.05)


def test_hard_attention_draws_while_learning_and_takes_the_best_in_use():
    parts = {"attention": "dot", "order": "after", "direction": "forward"}
    model = build(normalise="sample", **parts)
    seen = {}
    for name in ("eval", "train"):
        getattr(model, name)()
        torch.manual_seed(1)
        with torch.no_grad(), watch(model) as maps:
            out = model(*(torch.randint(3, 11, (9, 6)) for _ in range(2)))
        seen[name] = maps["decoder.cross"].weights()
        assert torch.equal(seen[name].sort(-1).values[..., -2:].unique(), torch.tensor([0.0, 1.0]))
        assert out.isfinite().all()
    assert not torch.equal(seen["eval"], seen["train"])
    soft = build(**parts)
    soft.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(1)
    with torch.no_grad(), watch(soft) as maps:
        soft(*(torch.randint(3, 11, (9, 6)) for _ in range(2)))
    assert torch.equal(maps["decoder.cross"].weights().argmax(-1), seen["eval"].argmax(-1))


# Convolutions


@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_a_layer_is_a_convolution_of_torch_with_a_gate(kernel: int):
    torch.manual_seed(0)
    layer = enlarged(EncoderLayer(GatedConfig(6, kernel, 0.0)))
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    part = layer.gated.map
    weight = part.direction * (part.length / part.direction.norm(dim=1)).unsqueeze(1)
    weight = weight.view(12, kernel, 6).transpose(1, 2)
    before, after = (kernel - 1) // 2, kernel - 1 - (kernel - 1) // 2
    y = F.conv1d(F.pad(x.mT, (before, after)), weight, part.bias)
    close(layer(x, None), (x + F.glu(y.mT, -1)) * 0.5**0.5)


# Configs


def test_the_sizes_of_small_models_are_alike():
    for row in ("rnnenc", "rnnsearch"):
        with torch.device("meta"):
            model = Recurrent(preset("recurrent", "small", row))
        count = sum(p.numel() for p in model.parameters())
        assert 4.5e6 < count < 5.5e6, row


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="state of 8 numbers with a memory of 16; choose bilinear"):
        build(attention="dot")
    for key, name, right in [
        ("cell", "lstn", "lstm"),
        ("attention", "aditive", "additive"),
        ("order", "befor", "before"),
        ("normalise", "sampled", "sample"),
        ("readout", "max", "maxout"),
    ]:
        with pytest.raises(UsageError, match=f"unknown {key} '{name}'.*Did you mean '{right}'"):
            Recurrent(RecurrentConfig(11, 11, block=replace(CELL, **{key: name})))


# The task

ONE = ["one", "two", "three", "four", "five", "six"]
EINS = ["eins", "zwei", "drei", "vier", "fuenf", "sechs"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with pairs whose words come in reverse order."""
    folder = tmp_path_factory.mktemp("recurrent")
    chance = random.Random(0)
    for part, count in (("train", 400), ("valid", 20), ("test", 20)):
        rows = [chance.choices(range(6), k=chance.randint(2, 6)) for _ in range(count)]
        lines = [
            " ".join(ONE[i] for i in row) + "\t" + " ".join(EINS[i] for i in reversed(row))
            for row in rows
        ]
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    return folder


TINY = {"pieces": 300, "width": 32, "batch_tokens": 400, "threads": 1, "valid_sentences": 4}


def train(home: Path, out: str, **values) -> Path:
    """Train a tiny translator by the command line."""
    values = {**TINY, "steps": 3, "warmup": 2, "data": home, "out": home / out, **values}
    words = [f"{key}={value}" for key, value in values.items()]
    assert main(["train", "translate", *words, "--quiet"]) == 0
    return home / out


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """Return a translator that has learned a little."""
    return train(home, "search", like="rnnsearch", steps=40, lr=0.01, valid_every=40, dropout=0)


def test_rnnsearch_is_trained_run_judged_and_looked_at(trained: Path, home: Path, capsys):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    told = json.loads((trained / "config.json").read_text())
    assert told["family"] == "recurrent" and told["model"]["block"]["attention"] == "additive"
    head = json.loads((trained / "generation_config.json").read_text())["alignment_head"]
    assert head == "decoder.cross:0"
    capsys.readouterr()
    assert main(["run", str(trained), "one two three", "n_best=2", "alignments=pharaoh"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["eval", str(trained), f"data={home}"]) == 0
    assert "BLEU" in capsys.readouterr().out
    assert main(["look", str(trained), "one two three", f"out={home / 'look.png'}"]) == 0
    assert (home / "look.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("like", ["rnnsearch", "luong", "rnnenc", "convs2s"])
def test_what_a_beam_finds_is_as_likely_as_it_says(like: str):
    name = "convolutional" if like == "convs2s" else "recurrent"
    config = models.preset(name, "tiny", like)
    torch.manual_seed(0)
    model = models.family(name)[1](
        replace(config, source_vocab=13, target_vocab=13, block=replace(config.block, width=16))
    )
    model = enlarged(model.eval())
    source, lengths = torch.randint(3, 13, (3, 6)), torch.tensor([6, 2, 4])
    found = searching.beam(model, source, lengths, beam=4, n_best=3, max_length=7)
    alone = searching.beam(model, source[1:2, :2], beam=4, n_best=3, max_length=7)[0]
    assert [text.ids for text in found[1]] == [text.ids for text in alone]
    for row, some in enumerate(found):
        again = [row] * len(some)
        right = searching.judge(model, source[again], lengths[again], [text.ids for text in some])
        for text, other in zip(some, right, strict=True):
            assert text.steps == pytest.approx(other.steps[: len(text.steps)], abs=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"like": "luong"},
        {"like": "seq2seq", "cell": "gru"},
        {"like": "rnnsearch", "normalise": "sample", "r_drop": 1},
        {"like": "rnnsearch", "attention": "location", "order": "after", "readout": "tanh"},
        {"like": "convs2s", "kernel": 5, "depth": 2},
    ],
    ids=lambda settings: settings["like"],
)
def test_every_kind_is_trained(settings: dict, home: Path, tmp_path: Path):
    folder = train(home, str(tmp_path / "run"), **settings)
    assert (folder / "model.safetensors").exists()


def test_a_fixed_context_has_nothing_to_look_at(home: Path, capsys):
    folder = train(home, "enc", like="rnnenc")
    assert "alignment_head" not in json.loads((folder / "generation_config.json").read_text())
    assert main(["run", str(folder), "one two"]) == 0
    for words in (["look"], ["run", "alignments=pharaoh"]):
        capsys.readouterr()
        verb, *rest = words
        assert main([verb, str(folder), "one two", *rest]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "one fixed context" in line


def test_a_trained_translator_is_trained_on_by_its_own_family(trained: Path, home: Path):
    folder = train(home, "on", init=trained, width=32)
    assert json.loads((folder / "config.json").read_text())["family"] == "recurrent"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"like": "rnnserch"}, "unknown preset 'rnnserch'.*Did you mean 'rnnsearch'"),
        ({"like": "rnnsearch", "init": "runs/x"}, "like=rnnsearch is for a new model"),
        ({"like": "rnnsearch", "heads": "4"}, "heads"),
        ({"like": "rnnsearch", "dropout": "2"}, "dropout=2"),
        ({"cell": "gru"}, "cell"),
    ],
)
def test_wrong_settings_are_refused(values: dict, message: str):
    with pytest.raises(UsageError, match=message):
        TRANSLATE.resolve({"data": "x", **values})
