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
_SHORT_DASHES = (0, (2, 1))
_LONG_DASHES = (0, (8, 2))
_OTHERS = [
    ("#E69F00", _SHORT_DASHES, "P"),
    ("#56B4E9", _SHORT_DASHES, "*"),
    ("#999999", _SHORT_DASHES, "X"),
    ("#E69F00", _LONG_DASHES, "<"),
    ("#56B4E9", _LONG_DASHES, ">"),
    ("#999999", _LONG_DASHES, "h"),
]


def looks(algorithms: Iterable[str] = ()) -> Looks:
    """Return color, line style and marker of each algorithm.

    :param algorithms: labels, in the order in which those without a fixed look get one
    """
    others = [label for label in dict.fromkeys(algorithms) if label not in _LOOKS]
    result = dict(_LOOKS)

    # More than six others share looks.
    for index, label in enumerate(others):
        result[label] = _OTHERS[index % len(_OTHERS)]
    return result
