"""What an algorithm maximises, in the words and formulas of a model card."""

import re

from sb3_ano.algorithms import ANO, PAPO, ShapedPolicyAlgorithm

# The Hub knows $$ for formulas of their own, and for those in the text only this.
_INLINE = re.compile(r"(?<!\$)\$(?!\$)(.+?)(?<!\$)\$(?!\$)")
_SHAPES = {
    "ano": r"h(x) = \frac{45}{32 \ln 2}\big(\phi(-1) - \phi(x - 1)\big), \qquad "
    r"\phi(z) = \ln(1 + 2^{-2z}) + \frac{4}{1 + 2^{-z}}",
    "spo": r"h(x) = x - \frac{x^2}{2}",
    "ppo": r"h(x) = \min(x, 1)",
    "identity": r"h(x) = x",
}
_DEVIATION = (
    "with the probability ratio $r$, the advantage $A$, the radius $\\varepsilon$ (`clip_range`; above 1 `clip_range_high`, "
    "if it is set) and the deviation $x = \\operatorname{sign}(A)\\,(r - 1)/\\varepsilon$"
)
_PAPO = r"""Mean and variance on top of PPO's clip, with the ratio $r$, its clip $c$, the normalised advantage $D$, the
one-step TD error $d$ and the value $V$:

$$
\begin{aligned}
J &= \operatorname{mean} \min(rD, cD) \\
MV &= \omega_1 \operatorname{mean} \min\big((r-1)d^2 + 2\omega_2 r d,\; (c-1)d^2 + 2\omega_2 c d\big) \\
VM &= \tfrac{\omega_1 (1-\gamma^2)}{k} \operatorname{mean}\big(D^2 + 2|D|V\big) - \big[J^2 + 2\operatorname{mean}(V)\,J\big] \\
\text{loss} &= -\big(J - k\,(MV + VM)\big)
\end{aligned}
$$

The bracket is zero if $J + \operatorname{mean}(V) - 4\gamma\,\mathrm{KL}\max(D)/(1-\gamma)^2 < 0$."""


def surrogate_text(model: ShapedPolicyAlgorithm) -> str:
    """The surrogate of a model, in Markdown with formulas.

    :param model: the agent
    """
    return _INLINE.sub(r"\\\\(\1\\\\)", _text(model))


def _text(model: ShapedPolicyAlgorithm) -> str:
    if isinstance(model, PAPO):
        return _PAPO
    name = model.shaping_name if isinstance(model, ANO) else "spo"
    if isinstance(name, str):
        return f"Shape `{name}`: maximise $A + |A|\\,\\varepsilon\\,h(x)$ {_DEVIATION}, where\n\n{_shape_text(name)}"
    positive, negative = name
    return (
        f"Two shapes: maximise $A + |A|\\,\\varepsilon\\,h(x)$ {_DEVIATION}.\n\nFor $A \\ge 0$, `{positive}`:\n\n"
        f"{_shape_text(positive)}\n\nFor $A < 0$, `{negative}`:\n\n{_shape_text(negative)}"
    )


def _shape_text(name: str) -> str:
    if name in _SHAPES:
        return f"$${_SHAPES[name]}$$"
    return f"$h$ is the author's own function `{name}`."
