"""Writes a model as ONNX files and compares them, by onnxruntime, with what they were made of."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import __version__
from regard.errors import UsageError, log
from regard.files import making, write_atomically
from regard.metrics.mixture import LINEAR_ALONE
from regard.onnx.programs import PROGRAMS, Exported, Greedy, Program
from regard.onnx.readme import readme
from regard.pretrained.tokenizer_folder import export_tokenizers
from regard.tasks.runner import Runner

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of an output, by the largest number in it where that is more than 1
_TRACED = (3, 7)  # rows and length of the inputs that a program is traced with: both may vary
_GREEDY_TOKENS = 24  # that are written to compare texts

Run = Callable[..., Sequence[np.ndarray]]


def export_onnx(runner: Runner[Any], out: str | Path) -> Path:
    """Write a model as ONNX files into a folder, and return that.

    Every file is run by onnxruntime on inputs of several shapes; where an output is not the
    model's, it is an error and nothing is written.
    """
    for name in _PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            raise UsageError(
                f"the package {name} is not installed; pip install regard[onnx]"
            ) from error
    if runner.name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        raise UsageError(f"ONNX takes a model for {known} from us, not one for {runner.name}")
    if getattr(getattr(runner.codec, "baselines", None), "mixture", None) is not None:
        raise UsageError(LINEAR_ALONE)
    runner.model.eval()
    exported = PROGRAMS[runner.name](runner)
    with making(out) as partial:
        runs = [_written(program, partial, runner.family) for program in exported.programs]
        worst = max(map(compare, exported.programs, runs))
        if exported.greedy is not None:
            compare_texts(exported, runs)
        about = {"regard": __version__, "task": runner.name, "family": runner.family}
        about |= {"files": [f"{program.name}.onnx" for program in exported.programs]}
        about |= {"largest_difference": float(f"{worst:.1e}"), **exported.about}
        text = json.dumps(about, ensure_ascii=False, indent=1)
        write_atomically(partial / "onnx.json", text + "\n")
        _write_tokenizers(partial, exported, runner)
        write_atomically(partial / "README.md", readme(runner, exported, worst))
    files = " and ".join(f"{program.name}.onnx" for program in exported.programs)
    log(f"{files}: equal to the model to {worst:.0e} by onnxruntime, in several shapes")
    return Path(out)


def _write_tokenizers(folder: Path, exported: Exported, runner: Runner[Any]) -> None:
    """Write what makes ids of texts: one tokenizer.json, or one in source/ and one in target/."""
    if exported.tokenizers is None:
        return
    source, target = exported.tokenizers
    config = {**runner.config, "task": runner.name}
    sides = {"": source} if source is target else {"source": source, "target": target}
    for name, tokenizer in sides.items():
        (folder / name).mkdir(exist_ok=True)
        export_tokenizers(folder / name, (tokenizer, tokenizer), config)
    features = getattr(getattr(runner.codec, "encoder", None), "features", None)
    if features is not None:
        features.save(folder)


def _written(program: Program, folder: Path, family: str) -> Run:
    """Write a program as a file, and return what runs that."""
    path = folder / f"{program.name}.onnx"
    try:
        with _silent():
            _trace(program).save(path)
            return open_onnx(path)
    except UsageError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:160] or type(cause).__name__
        raise UsageError(
            f"{program.name} of this {family} cannot be written as ONNX: torch.export says {why}"
        ) from error


def open_onnx(path: Path) -> Run:
    """What runs an ONNX file on arrays in the order of its inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> Sequence[np.ndarray]:
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        outputs: Any = session.run(None, given)
        return outputs

    return run


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what torch.onnx says of operators that nobody asked for out of sight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


@torch.no_grad()
def _trace(program: Program) -> Any:
    """Program in ONNX's terms, with all axes of any length that it names."""
    import onnx_ir

    rows, length = _TRACED
    inputs = program.sample(rows, max(2, min(length, program.longest)))
    program(*inputs)  # what is kept by size is made now, and not of symbols
    any_length = torch.export.Dim.DYNAMIC
    axes = tuple(
        {n: any_length for n, axis in enumerate(shape) if isinstance(axis, str)}
        for shape in program.inputs.values()
    )
    traced = torch.export.export(program.part, inputs, dynamic_shapes=(axes,), strict=False)
    made = torch.onnx.export(
        traced,
        dynamo=True,
        verbose=False,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
    )
    assert made is not None
    graph = made.model.graph
    for values, shapes in ((graph.inputs, program.inputs), (graph.outputs, program.outputs)):
        for value, shape in zip(values, shapes.values(), strict=True):
            value.shape = onnx_ir.Shape(shape)
    return made


def shapes_tried(longest: int) -> list[tuple[int, int]]:
    """Rows and lengths that a program is compared on: alone and padded, of length 1 and longest."""
    if longest == 1:
        return [(1, 1), (2, 1), (5, 1)]
    return [(1, 1), (2, 1), (1, 9), (4, 13), (1, longest), (2, longest)]


def compare(program: Program, run: Run) -> float:
    """Largest difference of outputs by ONNX from the model's, or a refusal if it is too large."""
    worst = 0.0
    for rows, length in shapes_tried(program.longest):
        inputs = program.sample(rows, min(length, program.longest))
        for name, ours, theirs in zip(program.outputs, program(*inputs), run(*inputs), strict=True):
            wanted = ours.numpy()
            where = f"{program.name}.onnx: {name} of {rows} rows of length {length}"
            if wanted.shape != theirs.shape:
                raise UsageError(f"{where} is {theirs.shape}, but the model's {wanted.shape}")
            if not wanted.size:
                continue
            scale = max(1.0, float(np.abs(wanted).max()))
            difference = float(np.abs(wanted.astype(np.float64) - theirs).max()) / scale
            if not difference <= TOLERANCE:
                raise UsageError(
                    f"{where} is {difference:.1e} away from the model's; expected at most "
                    f"{TOLERANCE:g}. Nothing was written; please report this"
                )
            worst = max(worst, difference)
    return worst


def compare_texts(exported: Exported, runs: Sequence[Run]) -> None:
    """Refuse files by which other texts are written than by the model."""
    assert exported.greedy is not None
    encoder, decoder = exported.programs
    for length in (1, 5, min(20, encoder.longest)):
        inputs = encoder.sample(1, length)
        ours = write_greedily(encoder, decoder, inputs, exported.greedy)
        theirs = write_greedily(runs[0], runs[1], inputs, exported.greedy)
        if ours != theirs:
            raise UsageError(
                f"the files write the tokens {theirs} where the model writes {ours}; nothing was "
                "written, please report this"
            )


def write_greedily(
    encoder: Callable[..., Any], decoder: Callable[..., Any], inputs: Any, how: Greedy
) -> list[int]:
    """Tokens of the likeliest text, each the likeliest after those before it."""
    memory, *rest = (torch.as_tensor(x) for x in encoder(*inputs))
    lengths = rest[0] if rest else inputs[1]
    ids = list(how.begin)
    for _ in range(min(how.most, _GREEDY_TOKENS)):
        logits = np.array(decoder(torch.tensor([ids]), memory, lengths)[0])[0, -1]
        logits[list(how.never)] = -np.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == how.end:
            break
    return ids
