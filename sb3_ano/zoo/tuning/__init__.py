"""Hyperparameter search: ``train -optimize`` for ANO, SPO and PAPO, resumable and shared by several processes."""

__all__ = ["register_tuning"]


def register_tuning() -> None:
    """Give the zoo's search our spaces, trials, storage and report; calling it again changes nothing.

    :raises MissingExtraError: if rl-zoo3 is not installed
    """
    from sb3_ano.zoo.tuning.registration import register

    register()
