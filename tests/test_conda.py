"""The conda recipe says what pyproject.toml says."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import regard

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "conda" / "recipe.yaml"
NAMES = {  # of conda-forge, where they differ
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "soundfile": "pysoundfile",
    "soxr": "soxr-python",
}


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return yaml.safe_load(RECIPE.read_text())


def test_versions_licence_and_dependencies_are_those_of_pyproject(recipe):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    told, about = project["project"], recipe["about"]
    wanted = [one.split(">=") for one in told["dependencies"]]
    run = [f"python {told['requires-python']}"]
    run += [f"{NAMES.get(name, name)} >={least}" for name, least in wanted]
    assert recipe["requirements"]["run"] == run
    host = recipe["requirements"]["host"]
    built = [one.replace(">=", " >=") for one in project["build-system"]["requires"]]
    assert host == [run[0], "pip", *built]
    assert recipe["context"]["version"] == regard.__version__
    assert (about["license"], about["summary"]) == (told["license"], told["description"])
    assert (ROOT / about["license_file"]).is_file()


def test_it_renders_for_every_system(recipe):
    rattler = pytest.importorskip("rattler_build", reason="pip install py-rattler-build")
    for system in ("linux-64", "linux-aarch64", "osx-arm64", "win-64"):
        config = rattler.RenderConfig(platform=rattler.PlatformConfig(target_platform=system))
        made = rattler.Stage0Recipe.from_file(str(RECIPE)).render(
            rattler.VariantConfig({"c_compiler": ["gcc"], "python": ["3.11.*"]}), config
        )
        assert len(made) == 1
