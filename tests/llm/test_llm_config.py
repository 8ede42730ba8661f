"""Settings that are refused, each with one line that says what is allowed."""

import pytest

from sb3_ano.llm import GANOConfig, ShapedGRPOConfig


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
        ({"dual": "official"}, "dual='official' is not allowed with a shape; allowed are 'paper', 'official_rlhf'"),
        ({"epsilon": 0.0}, "epsilon=0.0 is not a radius; allowed are finite numbers above 0"),
        ({"epsilon_high": float("nan")}, "epsilon_high=nan is not a radius"),
        ({"beta": -0.1}, "beta=-0.1 is not allowed; allowed are finite numbers from 0"),
        (
            {"kl_in": "reward", "beta": 0.1, "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation='normalize_then_sum' is not allowed with kl_in='reward'",
        ),
    ],
    ids=str,
)
def test_what_a_shape_cannot_honour_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShapedGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **settings)


def test_settings_that_act_on_nothing_are_let_through(tmp_path):
    for settings in ({"use_bias_correction_kl": True, "beta": 0.0}, {"use_bias_correction_kl": True, "kl_in": "reward"}):
        ShapedGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **settings)


def test_settings_survive_being_written_down(tmp_path):
    config = GANOConfig(str(tmp_path), bf16=False, use_cpu=True, shaping="spo", epsilon_high=0.3)
    written = config.to_dict()
    assert (written["shaping"], written["kl_in"], written["epsilon_high"]) == ("spo", "reward", 0.3)
    assert '"shaping": "spo"' in config.to_json_string()
