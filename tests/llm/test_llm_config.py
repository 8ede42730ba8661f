"""Settings: GANO's, and those that are rejected with one line that says what is allowed."""

import pytest

from sb3_ano.llm import GANOConfig, ShapedGRPOConfig

CPU = {"bf16": False, "use_cpu": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shaping": "anno"}, "shaping='anno' is unknown; allowed are"),
        ({"shaping": "nowhere:shape"}, "shaping='nowhere:shape' cannot be imported"),
        ({"loss_type": "cispo"}, "loss_type='cispo' is not allowed with a shape; allowed are 'grpo', 'bnpo'"),
        ({"loss_type": "sapo"}, "loss_type='sapo' is not allowed"),
        ({"loss_type": "vespo"}, "loss_type='vespo' is not allowed"),
        ({"delta": 4.0}, "delta=4.0 is not allowed with a shape: the shape replaces the clip"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1 is not allowed with a shape"),
        ({"use_bias_correction_kl": True, "beta": 0.1}, "use_bias_correction_kl=True is not allowed with a shape"),
        ({"kl_in": "advantage"}, "kl_in='advantage' is not allowed with a shape; allowed are 'loss', 'reward'"),
        ({"epsilon": 0.0}, "epsilon=0.0 is not a radius; allowed are positive finite numbers"),
        ({"epsilon_high": float("nan")}, "epsilon_high=nan is not a radius"),
        ({"beta": -0.1}, "beta=-0.1 is not allowed; allowed are finite numbers from 0"),
        ({"num_iterations": 0}, "num_iterations=0 is not allowed; allowed are positive integers"),
        (
            {"kl_in": "reward", "beta": 0.1, "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation='normalize_then_sum' is not allowed with kl_in='reward'",
        ),
    ],
    ids=str,
)
def test_what_a_shape_cannot_honor_is_rejected(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShapedGRPOConfig(str(tmp_path), **CPU, **settings)


def test_settings_that_act_on_nothing_are_allowed(tmp_path):
    for settings in ({"use_bias_correction_kl": True, "beta": 0.0}, {"use_bias_correction_kl": True, "kl_in": "reward"}):
        ShapedGRPOConfig(str(tmp_path), **CPU, **settings)


def test_gano_has_the_papers_settings_and_survives_being_written(tmp_path):
    config = GANOConfig(str(tmp_path), **CPU)
    assert (config.num_generations, config.num_iterations, config.epsilon, config.beta) == (4, 3, 0.2, 0.05)
    assert (config.learning_rate, config.lr_scheduler_type, config.max_completion_length) == (3e-6, "cosine", 53)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert (config.shaping, config.kl_in) == ("ano", "reward")
    written = GANOConfig(str(tmp_path), **CPU, shaping="spo", epsilon_high=0.3).to_dict()
    assert (written["shaping"], written["kl_in"], written["epsilon_high"]) == ("spo", "reward", 0.3)
