"""All tasks by name: what a model is trained and used for."""

from importlib import import_module
from types import ModuleType

from regard.errors import choose

# name -> (module that trains it, module and class that run it)
TASKS: dict[str, tuple[str, str, str]] = {
    "translate": ("regard.tasks.translate", "regard.tasks.translator", "Translator"),
}


def trainer(name: str) -> ModuleType:
    """Return the module that trains a task."""
    return import_module(choose("task", name, TASKS)[0])


def runner(name: str) -> type:
    """Return the class that runs a task."""
    _, module, cls = choose("task", name, TASKS)
    return getattr(import_module(module), cls)
