"""What `init=` names: a trained model that a new one starts from, loaded once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import UsageError
from regard.files.weights import state_of
from regard.models.folder import load_folder
from regard.pretrained.folder import import_folder, read_any_config
from regard.pretrained.tokenizer_folder import load_tokenizers
from regard.tasks.frame.settings import flat
from regard.tasks.frame.tune import HEAD_PREFIX

# fields of a config that may differ from those of the model it starts from
_INIT_MAY_DIFFER = {"dropout", "attention_dropout", "ffn_dropout", "drop_path", "max_length"}
# and those that differ where a task puts a new head on
_NEW_HEAD_KEYS = {"head", "labels", "pool", "head_dropout", "clusters", "cluster_beam"}


@dataclass(frozen=True)
class Origin:
    """A trained model with its config: one of ours, or a public checkpoint as it came."""

    folder: Path
    model: Any
    config: dict[str, Any]
    imported: dict[str, Any]  # what config.json is to say of the public format it came in

    @classmethod
    def load(cls, folder: str | Path) -> "Origin":
        """Load the model of a folder with its config."""
        folder = Path(folder)
        read, foreign = read_any_config(folder)
        if read is not None and foreign:
            model, config = import_folder(folder, read=load_tokenizers)[:2]
            came: Any = {"model_type": read.get("model_type")}
        else:
            model, config = load_folder(folder, config=read)
            came = config.get("imported")
        return cls(folder, model, config, {"imported": came} if isinstance(came, dict) else {})

    @property
    def family(self) -> str:
        """Return the family of the model."""
        return self.config["family"]

    def was(self, task: str, labels: list[str]) -> bool:
        """Tell whether the model did the same task with the same labels, so its head is kept."""
        return (self.config.get("task"), self.config.get("labels")) == (task, labels)

    def initialise(self, model: Any, fresh: str = "") -> str:
        """Copy the weights into a model of the same shape, but for those that are fresh.

        `fresh` is how the names of new weights begin, such as those of a new head; a head of
        another kind is new as well. Returns how the names of new weights begin.
        """
        before, now = flat(self.model.config), flat(model.config)
        if before.get("head") != now.get("head"):
            fresh = fresh or HEAD_PREFIX
        for key, value in now.items():
            may_differ = _INIT_MAY_DIFFER | _NEW_HEAD_KEYS if fresh else _INIT_MAY_DIFFER
            if before[key] != value and key.split(".")[-1] not in may_differ:
                raise UsageError(
                    f"init={self.folder} has {key}={before[key]}, but the new model has {value}; "
                    "leave the key out, or give the same value"
                )
        theirs = state_of(self.model)
        with torch.no_grad():
            for name, tensor in state_of(model).items():
                if fresh and name.startswith(fresh):
                    continue
                if name not in theirs or theirs[name].shape != tensor.shape:
                    raise UsageError(
                        f"init={self.folder}: its weights do not fit at {name}; use the same model"
                    )
                tensor.copy_(theirs[name])
        return fresh
