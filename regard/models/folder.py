"""A trained model as a folder: config.json in Regard's own words, and model.safetensors."""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import UsageError
from regard.files import MOST_JSON, errors_in, plain_file, read_json, refuse, write_atomically
from regard.files.hashes import remedy, verify
from regard.files.weights import COUNTER, LARGEST, from_bytes, state_of, stored_names
from regard.models import MODELS, PRETRAINERS, family, pretrainer
from regard.models.protocols import ModelConfig
from regard.own import missing, tell_changed
from regard.settings import fill

FOLDER_FORMAT = 2
WEIGHTS_FILE = "model.safetensors"
_REST = "pretraining.safetensors"  # of what an image encoder was pretrained with
_ENCODER = "encoder."  # prefix of the encoder's names there
MOST_PARAMETERS = 20_000_000_000
# errors of building a model from a config with unexpected values
STRANGE = (TypeError, ValueError, KeyError, IndexError, AttributeError)
STRANGE += (ArithmeticError, RecursionError, RuntimeError)


class _SkipInit(TorchFunctionMode):
    """Skip nn.init while modules are built on meta."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device, without initialising their weights."""
    with torch.device("meta"), _SkipInit():
        yield


def check_buildable(config: ModelConfig) -> None:
    """Refuse the config of a model that cannot be built, such as one with an unknown norm."""
    for name in MODELS:
        kind, model = family(name)
        if type(config) is kind:
            if labels := getattr(config, "labels", 0):  # their number is known with the data
                enough = max(2, labels, getattr(config, "clusters", 0))
                config = dataclasses.replace(config, labels=enough)
            with on_meta():
                model(config)
            return


def save_config(folder: Path, model: nn.Module, *, name: str, task: str, about: dict[str, Any]):
    """Write config.json: the family, the task, the sizes and parts, and what the task adds.

    Args:
        folder: folder of the model
        model: model with its config
        name: key of MODELS
        task: name of the task
        about: what the task adds
    """
    config = {
        "regard_format": FOLDER_FORMAT,
        "family": name,
        "task": task,
        **about,
        "model": dataclasses.asdict(model.config),  # type: ignore[arg-type]
    }
    write_atomically(
        folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    )


def save_weights(
    folder: Path,
    weights: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    name: str = WEIGHTS_FILE,
):
    """Write model.safetensors; shared weights are written once."""
    tensors = {name: _as_float(tensor.detach(), dtype) for name, tensor in weights.items()}
    data = save({name: t.cpu().contiguous() for name, t in tensors.items()}, {"format": "pt"})
    write_atomically(folder / name, data)


def save_parts(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write an encoder as the model of a folder, and what it was pretrained with beside it."""
    inner = {n.removeprefix(_ENCODER): w for n, w in weights.items() if n.startswith(_ENCODER)}
    rest = {name: w for name, w in weights.items() if not name.startswith(_ENCODER)}
    save_weights(folder, rest, name=_REST)
    save_weights(folder, inner)


def read_config(folder: Path, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a folder's config.json, unless it was read before, and check that it is one of ours."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UsageError(
            f"{folder}: no such model; expected a folder with config.json, or a starter's name"
        )
    config = read_json(path) if config is None else config
    if "regard_format" not in config and "model_type" in config:
        raise UsageError(
            f"{path}: a public checkpoint; import it first: regard import {folder} out=runs/mine"
        )
    if config.get("regard_format") != FOLDER_FORMAT:
        raise UsageError(
            f"{path}: not a Regard model (regard_format is {config.get('regard_format')!r})"
        )
    for key in ("family", "task", "model"):
        if key not in config:
            raise UsageError(f"{path}: '{key}' is missing")
    return config


def model_config(config: dict[str, Any], path: Path) -> Any:
    """Config of the model that a config.json describes."""
    tell_changed(path.parent, config.get("use"))
    needed = missing(config.get("use"))
    with errors_in(f"{path.parent} needs {needed}") if needed else nullcontext():
        return _model_config(config, path)


def _model_config(config: dict[str, Any], path: Path) -> Any:
    """The same, whichever files of own parts were given."""
    if not isinstance(config["family"], str) or config["family"] not in MODELS:
        raise UsageError(
            f"{path}: unknown family {config['family']!r}; choose from {', '.join(sorted(MODELS))}"
        )
    if not isinstance(config["model"], dict):
        raise UsageError(f"{path}: 'model' is not an object")
    return fill(family(config["family"])[0], config["model"], where=str(path))


def load_folder(
    folder: Path, device: str = "cpu", config: dict[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model that a folder describes and give it its weights.

    Everything is compared with the header of the weights before any memory is taken. `config` is
    what config.json holds, if it was read before.
    """
    folder = Path(folder)
    verify(folder)
    config = read_config(folder, config)
    settings = model_config(config, folder / "config.json")
    with _reading(folder, WEIGHTS_FILE) as path, safe_open(path, framework="pt") as file:
        count = len(file.keys())
    model = build_on_meta(config["family"], settings, folder / "config.json", count)
    assign_weights(model, _read_weights(folder, WEIGHTS_FILE, state_of(model), device))
    return model.eval(), config


def build_on_meta(name: str, settings: ModelConfig, path: Path, weights: int) -> nn.Module:
    """Build a model of a family with so many weights on meta, or refuse its config.

    Layers are built one by one, so more than the weights can be of are not even begun.
    """
    layers = _layers(dataclasses.asdict(settings))
    if layers > 2 * weights + 8:  # some models share their weights between layers
        raise UsageError(f"{path}: {layers:,} layers are too many for {weights:,} weights")
    try:
        with on_meta():
            return family(name)[1](settings)
    except UsageError as mistake:
        raise UsageError(f"{path}: {mistake}") from None
    except STRANGE as error:
        raise UsageError(f"{path}: sizes that do not fit each other ({error!r:.100})") from error


def _layers(settings: dict[str, Any]) -> int:
    """Number of layers in a config and those nested in it."""
    count = 0
    for key, value in settings.items():
        if isinstance(value, dict):
            count += _layers(value)
        elif key.endswith(("depth", "depths")):
            count += sum(value) if isinstance(value, list | tuple) else value
    return count


def load_rest(folder: Path, encoder: nn.Module, pretraining: Any) -> Any:
    """Build what an encoder was pretrained with around it, with the weights in its folder."""
    device = str(next(encoder.parameters()).device)
    read = lambda state: _read_weights(folder, _REST, state, device)  # noqa: E731
    return build_rest(folder, encoder, pretraining, read)


def build_rest(
    folder: Path,
    encoder: nn.Module,
    pretraining: Any,
    read: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Any:
    """Build what an encoder was pretrained with around it, as config.json says.

    `read` gives the weights that are not the encoder's.
    """
    where = str(folder / "config.json")
    if not isinstance(pretraining, dict) or pretraining.get("by") not in PRETRAINERS:
        raise UsageError(
            f"{where}: 'pretraining' is {pretraining!r:.40}; expected by, which is one of "
            f"{', '.join(PRETRAINERS)}, and its sizes"
        )
    config_class, whole_class = pretrainer(pretraining["by"])
    sizes = {key: value for key, value in pretraining.items() if key != "by"}
    settings = fill(config_class, sizes, where=where)
    try:
        with on_meta():
            whole = whole_class(encoder, settings)
    except (UsageError, AttributeError) as error:
        raise UsageError(f"{where}: 'pretraining' does not fit the model ({error})") from None
    named = state_of(whole)
    rest = {name: x for name, x in named.items() if not name.startswith(_ENCODER)}
    tensors = {name: x.detach() for name, x in named.items() if name not in rest}
    assign_weights(whole, {**tensors, **read(rest)})
    return whole.eval()


def _read_weights(
    folder: Path, name: str, state: dict[str, Tensor], device: str
) -> dict[str, Tensor]:
    """Read the state of a model, after all of it was compared with the header of the file."""
    total = sum(math.prod(x.shape) for x in state.values())
    if total > MOST_PARAMETERS:
        raise UsageError(
            f"{folder / 'config.json'}: asks for {total:,} parameters; too many to be meant"
        )
    with _reading(folder, name) as path:
        if path.stat().st_size <= 8 * total + MOST_JSON:  # else it cannot fit, and is not read
            verify(folder, name)
        with safe_open(path, framework="pt", device=device) as file:
            names = stored_names(state, set(file.keys()))
            shapes = {name: list(state[name].shape) for name in names}
            in_bytes = {name for name in names if _is_in_bytes(name, state[name], file)}
            rows = {name + LARGEST: shapes[name][:1] for name in in_bytes}
            _compare(path, shapes | rows, file)
            read = {name: _as_float(file.get_tensor(name), torch.float32) for name in names}
            largest = {name: file.get_tensor(name + LARGEST).float() for name in in_bytes}
            return read | {name: from_bytes(read[name], largest[name]) for name in in_bytes}


def _is_in_bytes(name: str, weight: Tensor, file: Any) -> bool:
    """True if a file has a matrix in bytes, as an export with quantise=int8 has them."""
    known = weight.ndim == 2 and weight.is_floating_point() and name in file.keys()  # noqa: SIM118
    return known and file.get_slice(name).get_dtype() == "I8"


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[Path]:
    """Name what is wrong with a file of weights while it is read."""
    path = folder / name
    plain_file(path)
    try:
        yield path
    except OSError as error:
        raise refuse(error, path) from error
    except (SafetensorError, struct.error, ValueError) as error:
        reason = " ".join(str(error).split())[:150]
        raise UsageError(f"{path}: damaged or cut short ({reason}); {remedy(folder)}") from error


def _compare(path: Path, expected: dict[str, list[int]], file) -> None:
    """Refuse weights whose names or shapes are not those of the model."""
    shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wrong = [f"missing {n}" for n in expected if n not in shapes]
    wrong += [f"unknown {n}" for n in shapes if n not in expected]
    wrong += [
        f"{n} is {shapes[n]}, not {shape}"
        for n, shape in expected.items()
        if shapes.get(n, shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(f"{path}: does not fit config.json: {'; '.join(wrong[:3])}{more}")


def _as_float(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Tensor in a floating-point type; whole numbers stay what they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def assign_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put a real state in the place of that on the meta device, shared weights staying shared.

    Matrices of products are laid by columns: with 4 to 32 rows, as in writing, PyTorch multiplies
    up to eight times faster by them, and with more rows no slower.
    """
    products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    counter = next(iter(tensors.values())).new_zeros((), dtype=torch.long)
    real: dict[int, Tensor] = {}
    for name, old in state_of(model).items():
        new = tensors.get(name, counter.clone()) if name.endswith(COUNTER) else tensors[name]
        new = new.t().contiguous().t() if id(old) in products else new
        real[id(old)] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, old in kind.items():
                if old is not None:
                    kind[name] = real[id(old)]  # type: ignore[assignment]
