"""Reading and changing what flows: nothing asked changes nothing, and a cut is a mask."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import regard
from regard.attention.attend import attend
from regard.attention.masks import TensorMask
from regard.attention.multihead import MultiHead
from regard.attention.watch import watch
from regard.costs.model import Reading, modality_read
from regard.errors import UsageError
from regard.layers.block import DecoderBlock
from regard.models import MODELS, family, info, preset
from regard.native import fast

SIZES = {"image": 32, "length": 9}


def build(name, **changes):
    """Make a tiny model of a family with an input of what it reads."""
    torch.manual_seed(0)
    config = replace(preset(name, next(iter(info(name).sizes))), **changes)
    reads = modality_read(info(name).reads)
    assert reads is not None
    key = reads[0].size_key
    size = min(SIZES.get(key, 200), getattr(config, "image", 10**6) or 10**6)
    reading = Reading(name, config, 2, {key: size})
    inputs = tuple(
        torch.randint(3, 20, x.shape) if x.dtype == torch.long else torch.randn(x.shape)
        for x in reading()
    )
    model = family(name)[1](config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # some begin with zeros, through which nothing goes
            weight.add_(0.02 * torch.randn_like(weight))
    return model, inputs


def leaves(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.fixture(params=sorted(MODELS))
def read(request):
    if modality_read(info(request.param).reads) is None:
        pytest.skip(f"{request.param} reads {info(request.param).reads}, which cost cannot make")
    return build(request.param)


def attending(model, inputs):
    """Return the names of the modules that attend, but for those that do so only to be watched."""
    with watch(model) as maps, torch.inference_mode():
        model(*inputs)
    reached = []
    for name in maps.names():
        try:
            with torch.inference_mode(), regard.change(model, {f"{name}.heads": lambda x: x}):
                model(*inputs)
        except UsageError as error:
            assert "not computed inside" in str(error)  # a gated unit, which is a recurrence
            continue
        reached.append(name)
    return reached


def giving_tensors(model, inputs):
    """Return the names of the modules that give a tensor, but for matrices.

    A matrix that is listened to is multiplied by itself, not as part of a larger product, which
    may round otherwise.
    """
    given, names = set(), {id(m): n for n, m in model.named_modules()}

    def note(module, args, result):
        if isinstance(result, torch.Tensor) and not isinstance(module, torch.nn.Linear):
            given.add(names[id(module)])

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.inference_mode():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return sorted(given - {""})


def test_recording_everything_and_changing_nothing_is_the_identity(read):
    model, inputs = read
    names = attending(model, inputs)
    with torch.inference_mode():
        plain = leaves(model(*inputs))
        places = [f"{name}.out" for name in giving_tensors(model, inputs)]
        kinds = ("weights", "heads")
        places += [f"{name}.{kind}" for name in names for kind in kinds]
        with regard.record(model, *places) as acts:
            seen = leaves(model(*inputs))
        with regard.change(model, {}):
            same = leaves(model(*inputs))
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, seen, same, strict=True)
    )
    assert set(acts) == set(places)


def test_patching_with_its_own_activations_is_the_identity(read):
    model, inputs = read
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)]
    if not linear:
        pytest.skip("no norm to patch")
    places = [f"{name}.out" for name in linear]
    with torch.inference_mode():
        with regard.record(model, *places) as acts:
            plain = leaves(model(*inputs))
        own = {name: iter(acts.calls(name)) for name in acts}
        with regard.change(
            model, {n: (lambda x, turn=turn: next(turn)) for n, turn in own.items()}
        ):
            patched = leaves(model(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(plain, patched, strict=True))


def test_weights_that_stay_and_heads_that_stay_change_nothing(read):
    model, inputs = read
    names = attending(model, inputs)
    if not names:
        pytest.skip("this family attends to nothing")
    with torch.inference_mode():
        plain = leaves(model(*inputs))
        for kind in ("weights", "heads"):
            with regard.change(model, {f"{name}.{kind}": lambda x: x for name in names}):
                again = leaves(model(*inputs))
            for a, b in zip(plain, again, strict=True):
                assert torch.allclose(a, b, atol=2e-5 * max(1.0, float(a.abs().max())))


def test_a_change_reaches_the_output(read):
    model, inputs = read
    names = attending(model, inputs)
    if not names:
        pytest.skip("this family attends to nothing")
    with torch.inference_mode():
        plain = leaves(model(*inputs))
        with regard.change(model, {f"{names[0]}.heads": 5.0}):
            changed = leaves(model(*inputs))
    assert not all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_cutting_an_edge_equals_masking_it():
    torch.manual_seed(0)
    layer = MultiHead(16, 4)
    x = torch.randn(3, 7, 16)
    may = torch.ones(1, 4, 7, 7, dtype=torch.bool)
    may[:, 2, 5, [1, 3]] = False
    masked = layer(x, mask=TensorMask(may))
    with watch(layer) as maps, regard.change(layer, {"mask": regard.cut([1, 3], 5, 2)}):
        cut = layer(x)
    assert torch.equal(masked, cut)
    weights = maps[""].weights()
    assert weights[:, 2, 5, [1, 3]].abs().max() == 0  # what is watched is what was used
    assert not torch.equal(cut, layer(x))


def test_a_changed_mask_only_takes_away():
    q = torch.randn(1, 1, 4, 8)
    module = torch.nn.Identity()
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    plain = attend(q, q, q, mask=causal, watch=module)
    with regard.change(module, {"mask": True}):
        assert torch.equal(attend(q, q, q, mask=causal, watch=module), plain)
        module(q)


def test_one_head_is_changed_and_no_other():
    torch.manual_seed(0)
    layer = MultiHead(16, 4)
    x = torch.randn(2, 5, 16)
    with regard.record(layer, "heads", "heads.2") as before, torch.no_grad():
        layer(x)
    with regard.change(layer, {"heads.2": 0.0}), regard.record(layer, "heads") as after:
        layer(x)
    assert torch.equal(before["heads.2"], before["heads"][:, 2])
    kept = [0, 1, 3]
    assert torch.equal(before["heads"][:, kept], after["heads"][:, kept])
    assert after["heads"][:, 2].abs().max() == 0


def test_weights_of_a_layer_by_itself_are_recorded():
    torch.manual_seed(0)
    layer = MultiHead(16, 4)
    with regard.record(layer, "weights", "weights.1", "queries", "keys") as acts:
        layer(torch.randn(2, 5, 16))
    assert set(acts) == {"weights", "weights.1", "queries", "keys"}
    scores = acts["queries"] @ acts["keys"].mT / 2
    assert torch.allclose(scores.softmax(-1), acts["weights"], atol=1e-6)
    assert torch.equal(acts["weights.1"][:, 0], acts["weights"][:, 1])


def test_residual_stream_hidden_vectors_memory_and_an_edge_are_reached():
    """Each changes the output, and recording them changes none of its bits."""
    model, inputs = build("transformer")
    places = {
        "encoder.1.out": lambda x: x + 1,
        "encoder.1.feed_forward.outer.in": 0.0,
        "decoder.1.cross.memory": lambda x: x.flip(1),
        "decoder.1.cross.mask": regard.cut(keys=2, queries=3, heads=1),
        "decoder.0.attention.queries": 0.0,
        "decoder.0.attention.keys": 0.0,
    }
    with torch.inference_mode():
        plain = model(*inputs)
        readable = [place for place in places if not place.endswith("mask")]
        with regard.record(model, *readable) as acts:
            assert torch.equal(model(*inputs), plain)
        assert set(acts) == set(readable)
        for place, to in places.items():
            with regard.change(model, {place: to}):
                assert not torch.equal(model(*inputs), plain), place
        with regard.change(model, {"decoder.1.cross.memory": acts["decoder.1.cross.memory"]}):
            assert torch.equal(model(*inputs), plain)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_recording_hidden_vectors_and_memory_changes_no_bit(name):
    if modality_read(info(name).reads) is None:
        pytest.skip(f"{name} reads {info(name).reads}, which cost cannot make")
    model, inputs = build(name)
    hidden = [n for n, _ in model.named_modules() if n.endswith(("outer", "feed_forward"))]
    memory = [n for n, m in model.named_modules() if isinstance(m, DecoderBlock)]
    places = [f"{n}.in" for n in hidden] + [f"{n}.cross.memory" for n in memory]
    if not places:
        pytest.skip("no feed-forward network and no memory")
    with torch.inference_mode():
        plain = leaves(model(*inputs))
        with regard.record(model, *places) as acts:
            seen = leaves(model(*inputs))
    assert len(acts) and all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_kernels_step_aside_and_the_answer_is_that_of_pytorch():
    torch.manual_seed(0)
    model, inputs = build("gpt")
    change = {"blocks.0.attention.heads.1": 0.0}
    with torch.inference_mode(), regard.change(model, change):
        slow = model(*inputs)
        with fast(model, frozen=True):
            quick = model(*inputs)
    assert torch.equal(slow, quick)


def test_a_beam_is_searched_with_the_change():
    model = regard.load("en-zh")
    texts = ["How are you?", "I like green tea.", "Where is the station?"] * 12
    plain = [str(answer) for answer in model.run(texts)]
    with regard.change(model, {"decoder.*.cross.heads": 0.0}):
        blind = [str(answer) for answer in model.run(texts)]
        assert blind[:3] == [str(a) for a in model.run(texts[:3], threads=1)]
    assert plain != blind and len(set(blind)) < len(set(plain)) or blind[0] == blind[1]
    assert [str(answer) for answer in model.run(texts)] == plain


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"encoder.9.out": 0.0}, "no module 'encoder.9'"),
        ({"encodr.0.out": 0.0}, "Did you mean 'encoder.0'"),
        ({"encoder.0.outt": 0.0}, "Did you mean 'out'"),
        ({"decoder.0.out": 0.0}, "not computed inside"),
        ({"encoder.0.attention.heads.99": 0.0}, "heads 0 to"),
        ({"encoder.0.out": torch.zeros(3, 1, 7)}, "does not broadcast"),
        ({"encoder.0.feed_forward.memory": 0.0}, "reads no memory"),
    ],
)
def test_what_is_not_there_is_refused_by_name(places, message):
    model, inputs = build("transformer")
    with pytest.raises(UsageError, match=message), regard.change(model, places):
        model.encode(inputs[0])


def test_what_was_not_recorded_is_refused_with_the_nearest():
    model, inputs = build("bert")
    with regard.record(model, "blocks.*.out") as acts, torch.inference_mode():
        model(*inputs)
    assert len(acts) == model.config.depth and "blocks.0.out" in repr(acts)
    with pytest.raises(UsageError, match="Did you mean 'blocks.0.out'"):
        acts["block.0.out"]


PLACES = ("encoder.0.in", "encoder.0.out", "decoder.0.cross.memory", "encoder.0.attention.heads")


@pytest.mark.parametrize("place", PLACES)
def test_other_threads_run_the_model_as_it_is(place: str):
    model, inputs = build("transformer")
    with torch.no_grad():
        expected = model(*inputs)
        with (
            ThreadPoolExecutor(1) as pool,
            regard.change(model, {place: 0.0}),
            regard.record(model, "encoder.1.out") as acts,
        ):
            here = model(*inputs)
            other = pool.submit(torch.no_grad()(model), *inputs).result()
        assert torch.equal(other, expected) and not torch.equal(here, expected)
    assert len(acts.calls("encoder.1.out")) == 1
