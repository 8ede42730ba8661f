"""Settings: the paper's, and those that are rejected with one line that says what is allowed."""

import pytest

from sb3_ano.llm import GANOConfig, ShapedGRPOConfig, ShapedPPOConfig

CPU = {"bf16": False, "use_cpu": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shaping": "anno"}, "shaping='anno' is unknown; allowed are"),
        ({"shaping": "nowhere:shape"}, "shaping='nowhere:shape' cannot be imported"),
        ({"loss_type": "cispo"}, "loss_type='cispo' is not allowed with a shape; allowed are 'grpo', 'bnpo'"),
        ({"delta": 4.0}, "delta=4.0 is not allowed with a shape: the shape replaces the clip"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1 is not allowed with a shape"),
        ({"use_bias_correction_kl": True, "beta": 0.1}, "use_bias_correction_kl=True is allowed with shaping='ppo' and"),
        ({"use_bias_correction_kl": True, "beta": 0.1, "shaping": "ppo", "kl_in": "reward"}, "kl_in='loss' only"),
        ({"kl_in": "advantage"}, "kl_in='advantage' is not allowed; allowed are 'loss', 'reward'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word' is not allowed; allowed are 'token'"),
        ({"epsilon": 0.0}, "epsilon=0.0 is not a radius; allowed are positive finite numbers"),
        ({"epsilon_high": float("nan")}, "epsilon_high=nan is not a radius"),
        ({"beta": -0.1}, "beta=-0.1 is not allowed; allowed are finite numbers from 0"),
        ({"missing_eos_penalty": float("inf")}, "missing_eos_penalty=inf is not allowed; allowed are finite numbers from 0"),
        ({"num_iterations": 0}, "num_iterations=0 is not allowed; allowed are positive integers"),
        *(
            ({**rewards, "multi_objective_aggregation": "normalize_then_sum"}, "'normalize_then_sum' is not allowed with")
            for rewards in ({"kl_in": "reward", "beta": 0.1}, {"missing_eos_penalty": 1.0})
        ),
    ],
    ids=str,
)
def test_what_a_shape_cannot_honor_is_rejected(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShapedGRPOConfig(str(tmp_path), **CPU, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "grpo"}, "loss_type='grpo' is not allowed with a critic; allowed are 'bnpo', 'dapo'"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' is not allowed with a critic; allowed are 'group'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "is not allowed with a critic"),
        ({"gamma": 1.1}, "gamma=1.1 is not allowed; allowed are numbers from 0 to 1"),
        ({"lam": float("nan")}, "lam=nan is not allowed; allowed are numbers from 0 to 1"),
        ({"vf_coef": -1.0}, "vf_coef=-1.0 is not allowed; allowed are finite numbers from 0"),
        ({"cliprange_value": 0.0}, "cliprange_value=0.0 is not allowed; allowed are positive finite numbers"),
    ],
    ids=str,
)
def test_what_a_critic_cannot_honor_is_rejected(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShapedPPOConfig(str(tmp_path), **CPU, **settings)


def test_the_papers_settings_survive_being_written(tmp_path):
    gano, critic = GANOConfig(str(tmp_path), **CPU), ShapedPPOConfig(str(tmp_path), **CPU)
    for config in (gano, critic):
        assert (config.epsilon, config.learning_rate, config.lr_scheduler_type) == (0.2, 3e-6, "cosine")
        assert (config.beta, config.kl_in, config.max_completion_length, config.temperature) == (0.05, "reward", 53, 0.7)
        assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert (gano.shaping, gano.num_generations, gano.num_iterations) == ("ano", 4, 3)
    assert (critic.shaping, critic.num_generations, critic.num_iterations, critic.loss_type) == (None, 1, 4, "bnpo")
    assert (critic.gamma, critic.lam, critic.vf_coef, critic.cliprange_value) == (1.0, 0.95, 0.1, 0.2)
    written = GANOConfig(str(tmp_path), **CPU, shaping="spo", epsilon_high=0.3).to_dict()
    assert (written["shaping"], written["kl_in"], written["epsilon_high"]) == ("spo", "reward", 0.3)


@pytest.mark.parametrize("size", [3, 2])
def test_a_critic_needs_no_groups(size, tmp_path):
    batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
    config = ShapedPPOConfig(str(tmp_path), **CPU, **batch)
    assert (config.num_generations, config.num_generations_eval, config.generation_batch_size) == (1, 1, size)
