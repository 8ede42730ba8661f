"""The layers of the package, and what importing it may pull in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sb3_ano"
OURS = {"sb3_ano"}
SB3 = {"numpy", "torch", "stable_baselines3", "gymnasium"}
ZOO = {"rl_zoo3", "matplotlib", "pandas", "yaml"}
LLM = {"torch", "trl", "transformers", "datasets", "tokenizers", "safetensors", "peft", "matplotlib", "tqdm"}

# Layer: (parts of this package, and other distributions, that it may import). The first matching prefix counts.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "sb3_ano.shaping": ({"sb3_ano.shaping"}, {"torch"}),
    "sb3_ano._compat": (set(), {"torch"}),
    "sb3_ano.extras": (set(), set()),
    "sb3_ano.envs.envpool_backend": ({"sb3_ano.envs", "sb3_ano.extras"}, SB3 | {"envpool"}),
    "sb3_ano.envs.ale_backend": ({"sb3_ano.envs", "sb3_ano.extras"}, SB3 | {"ale_py"}),
    "sb3_ano.envs": ({"sb3_ano.envs", "sb3_ano.extras"}, SB3),
    "sb3_ano.algorithms.buffers": (set(), SB3),
    "sb3_ano.algorithms.policies": ({"sb3_ano._compat"}, SB3),
    "sb3_ano.algorithms.parameters": ({"sb3_ano._compat", "sb3_ano.algorithms.policies"}, SB3),
    "sb3_ano.algorithms.schedules": (set(), SB3),
    "sb3_ano.algorithms.compiled": ({"sb3_ano._compat"}, SB3),
    "sb3_ano.algorithms.validation": (set(), SB3),
    "sb3_ano.algorithms.update": (
        {"sb3_ano._compat", *(f"sb3_ano.algorithms.{name}" for name in ("buffers", "compiled", "parameters", "policies"))},
        SB3,
    ),
    "sb3_ano.algorithms.actor": ({"sb3_ano._compat", "sb3_ano.algorithms.policies"}, SB3),
    "sb3_ano.algorithms.rollout": ({f"sb3_ano.algorithms.{name}" for name in ("actor", "buffers", "validation")}, SB3),
    "sb3_ano.algorithms": ({"sb3_ano._compat", "sb3_ano.algorithms", "sb3_ano.shaping", "sb3_ano.envs"}, SB3),
    "sb3_ano.zoo.tuning": ({"sb3_ano.zoo.tuning", "sb3_ano.zoo.options", "sb3_ano.extras"}, SB3 | ZOO | {"optuna"}),
    "sb3_ano.checkpoints": ({"sb3_ano.checkpoints"}, SB3),
    "sb3_ano.zoo.resume": ({"sb3_ano.zoo", "sb3_ano.checkpoints", "sb3_ano.extras"}, SB3 | ZOO),
    "sb3_ano.zoo.repairs": (
        {"sb3_ano.zoo", "sb3_ano.extras", "sb3_ano.bench.scores"},
        SB3 | ZOO | {"huggingface_sb3", "huggingface_hub", "imageio_ffmpeg", "requests", "sb3_contrib"},
    ),
    "sb3_ano.zoo.commands": ({"sb3_ano.zoo", "sb3_ano.hub"}, set()),
    "sb3_ano.zoo.hub_commands": (
        {"sb3_ano.hub", "sb3_ano.zoo.folders", "sb3_ano.algorithms.saving", "sb3_ano.extras"},
        SB3 | ZOO | {"huggingface_sb3"},
    ),
    "sb3_ano.zoo": ({"sb3_ano.zoo", "sb3_ano.algorithms", "sb3_ano.envs", "sb3_ano.extras"}, SB3 | ZOO),
    "sb3_ano.hub": (
        {f"sb3_ano.{name}" for name in ("_compat", "hub", "algorithms", "envs", "shaping", "extras", "zoo.curves")},
        SB3 | {"cloudpickle", "safetensors", "huggingface_hub", "imageio", "imageio_ffmpeg", "yaml"},
    ),
    "sb3_ano._io": (set(), set()),
    "sb3_ano._registry": ({"sb3_ano.algorithms"}, {"stable_baselines3"}),
    "sb3_ano.bench.scores": (set(), {"numpy"}),
    "sb3_ano.bench.statistics": ({"sb3_ano.extras"}, {"numpy", "scipy"}),
    "sb3_ano.bench.pool": (set(), {"torch"}),
    "sb3_ano.bench.report": (
        {"sb3_ano.bench", "sb3_ano.extras", "sb3_ano._io"},
        {"numpy", "pandas", "matplotlib", "jinja2"},
    ),
    "sb3_ano.bench.ray_backend": ({"sb3_ano.bench", "sb3_ano._io", "sb3_ano.extras"}, {"ray"}),
    "sb3_ano.bench.suites": (
        {"sb3_ano.bench", "sb3_ano._registry", "sb3_ano.envs", "sb3_ano.zoo.hyperparameters", "sb3_ano.extras"},
        {"yaml", "pydantic"},
    ),
    "sb3_ano.bench": (
        {f"sb3_ano.{name}" for name in ("bench", "_io", "_registry", "checkpoints", "envs", "extras")},
        SB3 | {"rich", "pandas", "sb3_contrib"},
    ),
    "sb3_ano.llm.objective": ({"sb3_ano.shaping"}, {"torch"}),
    "sb3_ano.llm": ({"sb3_ano.llm", "sb3_ano.shaping", "sb3_ano.extras"}, LLM),
    "sb3_ano": ({"sb3_ano.algorithms", "sb3_ano.extras"}, set()),
}
OPTIONAL = {
    "rl_zoo3",
    "optuna",
    "ale_py",
    "mujoco",
    "envpool",
    "huggingface_hub",
    "safetensors",
    "rliable",
    "ray",
    "trl",
    "cv2",
    "sbx",
    "scipy",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("module", modules())
def test_modules_import_only_what_their_layer_may(module):
    prefix = next(layer for layer in LAYERS if f"{module}.".startswith(f"{layer}."))
    own, others = LAYERS[prefix]
    for name in imported(modules()[module]):
        top = name.split(".")[0]
        if top in OURS:
            assert any(f"{name}.".startswith(f"{allowed}.") for allowed in own), f"{module} imports {name}"
        else:
            assert top in others or top in sys.stdlib_module_names, f"{module} imports {name}"


def test_importing_the_package_pulls_no_optional_dependency():
    def pulled_by(package: str) -> set[str]:
        code = f"import sys, {package}; print(*{{name.split('.')[0] for name in sys.modules}})"
        return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())

    assert "stable_baselines3" in pulled_by("sb3_ano")
    # SB3 itself imports some where they are installed.
    assert not OPTIONAL & (pulled_by("sb3_ano") - pulled_by("stable_baselines3"))


def test_shaping_is_usable_without_stable_baselines3():
    code = (
        "import sys, types; sys.modules['stable_baselines3'] = None; sys.modules['gymnasium'] = None\n"
        "package = types.ModuleType('sb3_ano'); package.__path__ = [sys.argv[1]]; sys.modules['sb3_ano'] = package\n"
        "import sb3_ano.shaping as shaping; print(shaping.check('ano').inflections)"
    )
    output = subprocess.run([sys.executable, "-c", code, str(PACKAGE)], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "1"
