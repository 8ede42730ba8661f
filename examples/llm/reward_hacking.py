"""Compare PPO, SPO, ANO, GRPO and GANO on a small task without downloads: who exploits the errors of the reward model?

    python examples/llm/reward_hacking.py --out llm-demo     # the same command resumes

It fine-tunes a small model on careless summaries, trains a reward model on comparisons with mistakes (the proxy reward), and
trains policies against it. The task's rule (the gold reward) measures how good they really are, but trains nothing.

With the setting "equal", all variants have the same beta, which is not the same strength for all of them. With "matched", each
has the beta at which its KL divergence ends where that of gano ends, found by trainings with a seed of their own.

``report.md`` has the tables, ``curves_SETTING.png`` and ``matrix_SETTING.png`` the figures, ``report.json`` everything.
"""

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import llm_report
import llm_task
import pandas as pd
import torch
from datasets import disable_progress_bars
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from sb3_ano._io import read_json, replace_directory, write_file, write_json
from sb3_ano._system import cores, now, versions
from sb3_ano.llm import ANOTrainer, GANOTrainer, LearnedReward, PPOTrainer, SPOTrainer, compare

#: Trainer and settings of each variant. grpo is the loss of TRL before 1.10, which weighted the KL divergence by no ratio;
#: grpo-r differs from it in the place of the KL divergence only, and from gano in the shape only.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (PPOTrainer, {}),
    "spo": (SPOTrainer, {}),
    "ano": (ANOTrainer, {}),
    "grpo": (GANOTrainer, {"shaping": "ppo", "kl_in": "loss", "use_bias_correction_kl": False}),
    "grpo-r": (GANOTrainer, {"shaping": "ppo"}),
    "gano": (GANOTrainer, {}),
}
DEFAULTS = [name for name in VARIANTS if name != "grpo-r"]
SETTINGS = ("equal", "matched")
PLAN: dict[str, Any] = {
    "posts": 20_000,
    "sft_steps": 1500,
    "comparisons": 3000,
    "held_out": 500,
    "trials": 4,
    "generations": 100,
    "iterations": 3,
    "learning_rate": 1e-3,
    "beta": 0.05,
}
QUICK = PLAN | {
    "posts": 256,
    "sft_steps": 4,
    "comparisons": 64,
    "held_out": 8,
    "trials": 1,
    "generations": 2,
}
#: Completions of a generation, which are those of an update.
COMPLETIONS = 64
#: Seed of the trainings that choose beta; no result is reported of it.
SEARCH_SEED = 100
#: Relative distance of the KL divergence from its target that is close enough; seeds differ as much.
TOLERANCE = 0.1
CPU: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "report_to": "none",
}
#: TRL's names of the curves, and ours.
CURVES = {
    "rewards/gold/mean": "gold",
    "rewards/reward_model/mean": "proxy",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "ratio/outside_low": "outside_low",
    "ratio/outside_high": "outside_high",
}


def make_start(out: Path, plan: dict[str, Any]) -> None:
    """Make what all policies start from, unless it exists: the directories ``sft``, ``reward`` and ``held_out``."""
    disable_progress_bars()
    tokenizer = llm_task.make_tokenizer()

    if not (out / "sft").exists():
        torch.manual_seed(0)
        model = llm_task.make_model(tokenizer)
        config = SFTConfig(
            str(out / "logs"),
            per_device_train_batch_size=64,
            max_steps=plan["sft_steps"],
            warmup_steps=50,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            **CPU,
        )
        posts = llm_task.make_posts(plan["posts"], seed=1)
        _train(SFTTrainer(model, config, None, posts, None, tokenizer), out / "sft")

    if not (out / "reward").exists():
        config = RewardConfig(
            str(out / "logs"),
            per_device_train_batch_size=32,
            num_train_epochs=3,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            **CPU,
        )
        pairs = llm_task.make_comparisons(plan["comparisons"], seed=2)
        _train(RewardTrainer(str(out / "sft"), config, None, pairs, None, tokenizer), out / "reward")

    if not (out / "held_out").exists():
        with replace_directory(out / "held_out") as new:
            llm_task.make_posts(plan["held_out"], seed=4).save_to_disk(str(new))


def _train(trainer: Any, directory: Path) -> None:
    trainer.train()
    with replace_directory(directory) as new:
        trainer.save_model(str(new))


def train_policy(out: Path, plan: dict[str, Any], variant: str, beta: float, seed: int) -> llm_report.Run:
    """Train a policy, unless it exists, and return its curves: the files ``policies/NAME`` and ``runs/NAME.json``."""
    name = run_name(variant, beta, seed)
    path = out / "runs" / f"{name}.json"
    if path.exists():
        return read_json(path)

    # Several policies are trained at the same time.
    torch.set_num_threads(1)
    start = time.process_time()
    tokenizer = llm_task.make_tokenizer()
    proxy = LearnedReward.load(str(out / "reward"), tokenizer, "cpu")
    trainer_class, settings = VARIANTS[variant]
    config = trainer_class.config_class(
        str(out / "logs"),
        per_device_train_batch_size=COMPLETIONS,
        gradient_accumulation_steps=1,
        num_iterations=plan["iterations"],
        max_steps=plan["generations"] * plan["iterations"],
        max_completion_length=llm_task.MAX_SUMMARY,
        learning_rate=plan["learning_rate"],
        beta=beta,
        missing_eos_penalty=1.0,
        temperature=1.0,
        reward_weights=[1.0, 0.0],  # the gold reward is logged, but not trained on
        logging_steps=1,
        seed=seed,
        **CPU,
        **settings,
    )
    prompts = llm_task.make_posts(2000, seed=3).select_columns(["prompt"])
    trainer = trainer_class(str(out / "sft"), [proxy, llm_task.gold], config, prompts, None, tokenizer)
    _train(trainer, out / "policies" / name)

    run = curves(trainer.state.log_history, plan["iterations"])
    run["seconds"] = round(time.process_time() - start, 1)
    write_json(path, run)
    return run


def run_name(variant: str, beta: float, seed: int) -> str:
    """Return the name of a training; settings with the same beta share it."""
    return f"{variant}_{beta:g}_{seed}"


def curves(history: list[dict[str, float]], iterations: int) -> llm_report.Run:
    """Return one value per generation: rewards and lengths of its completions, means over its updates of the rest."""
    updates = [entry for entry in history if "loss" in entry]
    result: llm_report.Run = {"completions": []}
    for name in CURVES.values():
        result[name] = []

    for start in range(0, len(updates), iterations):
        generation = updates[start : start + iterations]
        result["completions"].append(COMPLETIONS * (start // iterations + 1))
        for metric, name in CURVES.items():
            # Rewards are logged with the first update only.
            logged = [entry[metric] for entry in generation if metric in entry]
            result[name].append(round(sum(logged) / len(logged), 5))
    return result


def match_beta(out: Path, plan: dict[str, Any], variant: str, target: float) -> float:
    """Return the beta at which the KL divergence of a variant should end at a target, from a few trainings.

    The first training has the equal beta. The search ends within 10 % of the target; otherwise, the last two trainings are
    interpolated with the KL divergence as a power of beta, whose exponent is -1 after the first.

    :param out: directory of the runs
    :param plan: settings of the trainings
    :param variant: name of the variant
    :param target: KL divergence, nats per token
    """
    betas: list[float] = [plan["beta"]]
    found: list[float] = []
    for _ in range(plan["trials"]):
        found.append(max(llm_report.last(train_policy(out, plan, variant, betas[-1], SEARCH_SEED)["kl"]), 1e-5))
        distance = math.log(max(target, 1e-5) / found[-1])
        if abs(distance) < TOLERANCE:
            break
        slope = -1.0 if len(found) == 1 else math.log(found[-1] / found[-2]) / math.log(betas[-1] / betas[-2])
        # An error of the slope must not send beta anywhere.
        step = min(max(distance / min(slope, -0.3), -3.0), 3.0)
        betas.append(float(f"{betas[-1] * math.exp(step):.2g}"))
        if betas[-1] == betas[-2]:
            break
    return betas[-1]


def compare_policies(out: Path, plan: dict[str, Any], setting: str, betas: dict[str, float], seed: int) -> pd.DataFrame:
    """Return the win rates of the policies of a seed, and of the model that they start from, on held-out prompts."""
    directory = out / "compare" / f"{setting}_{seed}"
    arguments = []
    for name, beta in betas.items():
        arguments.append(f"{name}={out / 'policies' / run_name(name, beta, seed)}")
    arguments.append(f"sft={out / 'sft'}")

    # Prompts that no policy was trained on
    arguments += ["--dataset_name", str(out / "held_out"), "--dataset_split", "train", "--samples", str(plan["held_out"])]
    arguments += ["--temperatures", "1", "--max_completion_length", str(llm_task.MAX_SUMMARY), "--batch_size", "250"]
    arguments += ["--judge_function", "llm_task:gold", "--out", str(directory)]
    compare(arguments, "sb3-ano llm")
    return pd.read_csv(directory / "win_rates.csv")


def _log_to_file(directory: Path) -> None:
    """Redirect the output of this process, which is a screen of progress bars per training."""
    directory.mkdir(exist_ok=True)
    sys.stdout = sys.stderr = open(directory / f"{os.getpid()}.log", "w")  # noqa: SIM115 (until it ends)


def run_all(pool: Executor, function: Callable[..., Any], tasks: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Call a function for each task, in processes, and print each that has finished; results are by the task's name."""
    futures = {pool.submit(function, *arguments): name for name, arguments in tasks.items()}
    results = {}
    for number, future in enumerate(as_completed(futures), start=1):
        name = futures[future]
        results[name] = future.result()
        print(f"{now()}  {function.__name__} {number}/{len(tasks)}: {name}", flush=True)
    return {name: results[name] for name in tasks}


def main(arguments: list[str] | None = None) -> None:
    """Run the trainings that are missing in the output directory, and write the report after each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("llm-demo"), help="directory of models, curves and report")
    parser.add_argument("--algos", nargs="+", choices=list(VARIANTS), default=DEFAULTS, help="variants")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="equal beta, matched KL")
    parser.add_argument("--seeds", type=int, choices=range(1, SEARCH_SEED), metavar="N", default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, choices=range(1, 101), metavar="N", default=cores(), help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="try everything out; the numbers mean nothing")
    options = parser.parse_args(arguments)

    plan = QUICK if options.quick else PLAN
    out = options.out.absolute()
    if (out / "plan.json").exists() and read_json(out / "plan.json") != plan:
        parser.error(f"{out} holds results of other settings; choose another --out")
    write_json(out / "plan.json", plan)

    # The report says how it was made.
    settings = {"quick": options.quick, "seeds": options.seeds, **plan}
    settings |= versions(("sb3-ano", "trl", "transformers", "torch"))
    stated = ", ".join(f"{name} {value}" for name, value in settings.items())
    warning = llm_report.QUICK_WARNING if options.quick else ""
    report = llm_report.REPORT.format(warning=warning, settings=stated)
    numbers: dict[str, Any] = {"date": now(), "settings": settings}

    # For the new processes: one thread each, because they train in parallel, and no downloads.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _log_to_file, (out / "logs",)) as pool:
        run_all(pool, make_start, {"fine-tuning, reward model": (out, plan)})
        for setting in options.settings:
            betas = dict.fromkeys(options.algos, plan["beta"])
            title = "Equal beta"
            if setting == "matched":
                gano = (out, plan, "gano", plan["beta"], SEARCH_SEED)
                curve = run_all(pool, train_policy, {"gano": gano})["gano"]
                target = llm_report.last(curve["kl"])
                others = {name: (out, plan, name, target) for name in betas if name != "gano"}
                betas |= run_all(pool, match_beta, others)
                title = f"Matched KL divergence: {target:.2f}, that of gano with beta {plan['beta']} and seed {SEARCH_SEED}"

            # Trainings and comparisons of all seeds
            trainings = {}
            comparisons = {}
            for seed in range(options.seeds):
                comparisons[f"{setting}, seed {seed}"] = (out, plan, setting, betas, seed)
                for name, beta in betas.items():
                    trainings[run_name(name, beta, seed)] = (out, plan, name, beta, seed)
            done = run_all(pool, train_policy, trainings)
            tables = list(run_all(pool, compare_policies, comparisons).values())

            runs: dict[str, list[llm_report.Run]] = {}
            for name, beta in betas.items():
                runs[name] = [done[run_name(name, beta, seed)] for seed in range(options.seeds)]
            section, numbers[setting] = llm_report.write_section(out, setting, title, betas, runs, tables)
            report += section
            write_file(out / "report.md", report)
            write_json(out / "report.json", numbers)
    print(report)


if __name__ == "__main__":
    main()
