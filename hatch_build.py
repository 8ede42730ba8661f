"""Build hook: the hyperparameter files travel inside the wheel, while a source tree keeps them at its top."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class HyperparametersInWheel(BuildHookInterface):
    """Copies ``hyperparams/`` into standard wheels; an editable one would get copies that go stale."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["hyperparams"] = "sb3_ano/hyperparams"
