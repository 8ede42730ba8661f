"""Color, line style and marker of each algorithm, the same in all figures of reports, examples and benchmarks."""

from collections.abc import Iterable, Mapping
from typing import Any

#: Color, line style and marker by label of the algorithm.
Looks = Mapping[str, tuple[str, Any, str]]
# Okabe and Ito's palette (2008), without its yellow, which is too light for lines.
_LOOKS: Looks = {
    "ppo": ("#000000", (0, (4, 1.5)), "s"),
    "trpo": ("#CC79A7", (0, (1, 1)), "v"),
    "spo": ("#0072B2", (0, (5, 1, 1, 1)), "^"),
    "papo": ("#009E73", (0, (3, 1, 1, 1, 1, 1)), "D"),
    "ano": ("#D55E00", "-", "o"),
}
_OTHERS = [
    (color, line, marker)
    for line, markers in (((0, (2, 1)), "P*X"), ((0, (8, 2)), "<>h"))
    for color, marker in zip(("#E69F00", "#56B4E9", "#999999"), markers, strict=True)
]


def looks(algorithms: Iterable[str] = ()) -> Looks:
    """Return color, line style and marker of each algorithm.

    :param algorithms: labels, in the order in which those without a fixed look get one
    """
    others = [label for label in dict.fromkeys(algorithms) if label not in _LOOKS]
    return {**_LOOKS, **{label: _OTHERS[index % len(_OTHERS)] for index, label in enumerate(others)}}
