"""The layers of the package, and what importing it may pull in."""

import ast
import graphlib
import sys

import pytest

from tests.common import ROOT, python

SB3 = {"numpy", "torch", "stable_baselines3", "gymnasium"}
HUB = SB3 | {"cloudpickle", "safetensors", "huggingface_hub", "imageio", "imageio_ffmpeg", "yaml", "matplotlib", "pandas"}
HUB |= {"sb3_contrib"}
ZOO = HUB | {"rl_zoo3", "optuna", "huggingface_sb3"}
SCIENCE = {"numpy", "pandas", "scipy", "matplotlib", "tqdm"}
LLM = SCIENCE | {"torch", "trl", "transformers", "datasets", "safetensors", "peft", "openai"}
BASE = {"_arguments", "_io", "_secrets", "_system", "extras"}
AGENTS = BASE | {"_registry", "algorithms", "fast", "shaping", "envs", "checkpoints", "policies"}

# Layer: (other layers, and other distributions, that it may import).
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "_arguments": (set(), set()),
    "_io": ({"_secrets"}, set()),
    "_system": ({"_secrets"}, set()),
    "_secrets": (set(), set()),
    "extras": (set(), set()),
    "cli": ({"_secrets", "extras"}, set()),
    "__main__": ({"cli"}, set()),
    "shaping": (set(), {"torch"}),
    "reference": (set(), SB3),
    "envs": (BASE, SB3 | {"envpool", "ale_py", "pettingzoo"}),
    "checkpoints": (BASE, SB3 | {"cloudpickle"}),
    "policies": (set(), SB3),
    "fast": (BASE | {"shaping", "envs", "policies"}, SB3 | {"sb3_contrib"}),
    "algorithms": (BASE | {"shaping", "envs", "fast", "policies"}, SB3 | {"sb3_contrib"}),
    "_registry": ({"algorithms"}, {"stable_baselines3"}),
    "hub": (AGENTS, HUB),
    "rllib": (BASE | {"algorithms", "envs", "shaping"}, SB3 | {"ray"}),
    "zoo": (AGENTS | {"hub", "cli"}, ZOO | {"tqdm"}),
    "bench": (
        AGENTS | {"hub", "cli", "zoo"},
        SB3 | SCIENCE | {"rich", "rl_zoo3", "sb3_contrib", "ray", "yaml", "pydantic", "jinja2"},
    ),
    "llm": (BASE | {"shaping", "cli"}, LLM),
    "": ({"algorithms", "extras", "fast"}, set()),
}
OPTIONAL = {"rl_zoo3", "optuna", "ale_py", "mujoco", "envpool", "huggingface_hub", "safetensors"}
OPTIONAL |= {"rliable", "ray", "trl", "cv2", "sbx", "scipy", "sb3_contrib", "pettingzoo"}


PATHS = sorted((ROOT / "sb3_ano").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}


def imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
    return names


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_what_their_layer_may(module):
    layer = module.partition(".")[2].partition(".")[0]
    own, others = LAYERS[layer]
    for name in imported(MODULES[module]):
        top, _, inner = name.partition(".")
        if top != "sb3_ano":
            assert top in others or top in sys.stdlib_module_names, f"{module} imports {name}"
        elif layer or inner:
            allowed = {part for part in own | {layer} if f"{inner}.".startswith(f"{part}.")}
            assert allowed - {""}, f"{module} imports {name}"


def test_no_cycle_between_modules():
    # A package imports its modules, so that an import of a module from its own package would be a cycle only by name.
    graph = {
        module: {name for name in imported(path) & MODULES.keys() if not f"{module}.".startswith(f"{name}.")}
        for module, path in MODULES.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def printed(code: str) -> list[str]:
    return python("-c", code, check=True).stdout.split()


def test_importing_the_package_pulls_no_optional_dependency():
    code = "import sys; packages = lambda: {name.partition('.')[0] for name in sys.modules}\n"
    # SB3 itself imports some where they are installed.
    code += "import stable_baselines3; others = packages(); import sb3_ano.algorithms; print(*packages() - others)"
    code += "; print('compiler' if 'torch._dynamo' in sys.modules else '')"  # which takes as long as all the rest
    assert not (OPTIONAL | {"compiler"}) & {*printed(code)}


def test_shaping_is_usable_without_stable_baselines3():
    """``sb3_ano/__init__.py`` imported both. The layers keep them out of the trainers, too."""
    code = "import sys; sys.modules['stable_baselines3'] = sys.modules['gymnasium'] = None\n"
    code += "import sb3_ano.llm.cli, sb3_ano.shaping as shaping; print(shaping.check('ano').inflections)"
    assert printed(code) == ["1"]
