"""Train SmolLM2-135M for a few minutes on a reward that can be hacked, and print its texts before and after.

    python examples/llm/smollm_demo.py                  # ANO's shape without a critic (gano); --algo ano has one

Nothing is downloaded, and nothing is saved but the plain model in the cache.
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import smollm_study
import smollm_task
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

#: Prompts whose texts are printed.
PROMPTS = 6
#: A larger learning rate than in the study, because there are few updates.
LEARNING_RATE = 3e-5


class Print(TrainerCallback):
    """Print what a person wants to see of each update."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Print a line."""
        if "kl" not in logs:
            return
        line = f"update {state.global_step:3}  largest ratio {logs['ratio/max']:6.2f}"
        # The first update of a generation, whose completions the policy has not been trained on
        if "rewards/proxy/mean" in logs:
            line += f"  proxy {logs['rewards/proxy/mean']:5.2f}  gold {logs['rewards/gold/mean']:5.2f}"
            line += f"  KL {logs['kl']:6.3f}  entropy {logs['entropy']:5.2f}"
        print(line, flush=True)


def show(trainer: Any, path: Path) -> list[dict[str, Any]]:
    """Return the policy's texts of the first test prompts."""
    smollm_study.write_texts(trainer.model, trainer.processing_class, path, PROMPTS)
    return smollm_study.smollm_report.read_lines(path)


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=smollm_study.VARIANTS, default="gano", help="algorithm")
    parser.add_argument("--generations", type=int, default=6, help="generations of 16 completions")
    options = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    disable_progress_bar()
    # transformers renames an argument that TRL still passes.
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as directory:
        plan = {"generations": options.generations, "completions": 16}
        trainer = smollm_study.make_trainer(Path(directory), plan, options.algo, smollm_study.BETA, 0, LEARNING_RATE)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Print())
        before = show(trainer, Path(directory, "before.jsonl"))
        trainer.train()
        after = show(trainer, Path(directory, "after.jsonl"))

    for old, new in zip(before, after, strict=True):
        print(f"\n{old['prompt']} ...")
        for name, row in (("before", old), ("after", new)):
            text = " ".join(row["completion"].split())
            print(f"  {name:6}  proxy {smollm_task.proxy_score(row['completion']):5.2f}  {text}")


if __name__ == "__main__":
    main()
