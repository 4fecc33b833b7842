"""Kernels for the wheel: compiled where there is a compiler for a known Linux, else it has none."""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Adds a library for each level of processors, and the tag of where they run."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the package is installed to be worked on."""
        named = os.environ.get("CC", "gcc")  # as conda does
        compiler = shutil.which(named) or shutil.which("cc")
        if version == "editable" or compiler is None or sys.platform != "linux":
            return
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("ready", root / "regard/native/ready.py")
        assert spec is not None and spec.loader is not None
        ready = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(ready)
        if platform.machine() not in ready.LEVELS:
            return
        made = ready.build(compiler, root / "build" / "ready")
        for library in made:
            build_data["force_include"][str(library)] = f"regard/native/ready/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{ready.platform_tag(made)}"
