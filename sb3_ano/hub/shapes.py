"""The shape that an ANO agent was trained with, by name; a stranger's names are never imported."""

from pathlib import Path
from typing import Any

from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.algorithms.saving import SavedModel
from sb3_ano.hub.documents import SafeFormatError, fields, list_of, number, refused, shown, text
from sb3_ano.hub.values import CustomObjects, decode, encode
from sb3_ano.shaping import SHAPINGS, ShapingLike, fingerprint


def encode_shaping(model: ShapedPolicyAlgorithm) -> dict[str, Any] | None:
    """Name and fingerprint of the shape as JSON, or None for an algorithm that takes none."""
    if not isinstance(model, ANO):
        return None
    return {"name": model.shaping_name, "fingerprint": encode(model.shaping_fingerprint, "shaping.fingerprint", {})}


def decode_shaping(document: Any, algorithm: type[ShapedPolicyAlgorithm]) -> dict[str, Any] | None:
    """Attributes ``shaping_name`` and ``shaping_fingerprint`` of the saved model, or None.

    :raises SafeFormatError: if they are missing, or not of the right form
    """
    if not issubclass(algorithm, ANO):
        if document is not None:
            raise refused("shaping", document, f"null, because {algorithm.__name__} takes none")
        return None
    fields(document, "shaping", ("name", "fingerprint"))
    name = document["name"]
    if not isinstance(name, str) and len(list_of(text, 2)(name, "shaping.name")) != 2:
        raise refused("shaping.name", name, "a name and a list of two names")
    values = decode(document["fingerprint"], "shaping.fingerprint", CustomObjects(None))
    points = [len(each) for each in fingerprint("ano")]
    row = list_of(number(infinite=True), max(points))
    if [len(each) for each in list_of(row, len(points))(values, "shaping.fingerprint")] != points:
        raise SafeFormatError(f"shaping.fingerprint has not the {' and '.join(map(str, points))} values of a shape")
    return {"shaping_name": name if isinstance(name, list) else text(name, "shaping.name"), "shaping_fingerprint": values}


def is_built_in(name: str | list[str]) -> bool:
    """Whether every shape of this name is one of :data:`~sb3_ano.shaping.SHAPINGS`."""
    return all(each in SHAPINGS for each in ([name] if isinstance(name, str) else name))


def restored_shaping(
    algorithm: type[ShapedPolicyAlgorithm], folder: Path, stored: dict[str, Any] | None, shaping: ShapingLike | None
) -> dict[str, Any]:
    """The constructor's argument ``shaping``, verified as ``ANO.load`` does.

    :param stored: what :func:`decode_shaping` returned
    :param shaping: what the caller supplies
    :raises SafeFormatError: if the shape is not built in and the caller supplies none
    :raises ValueError: if the shape cannot be used, or a built-in one is another than it was
    :raises TypeError: if the algorithm takes no shape, and the caller supplies one
    """
    if stored is None:
        if shaping is not None:
            raise TypeError(
                f"shaping={shaping!r} is given, but {folder} holds an agent of {algorithm.__name__}, which takes none"
            )
        return {}
    if shaping is None and not is_built_in(stored["shaping_name"]):
        raise SafeFormatError(
            f"{folder} was trained with shaping={shown(stored['shaping_name'])}, which is not built in and is never "
            "imported by its name; pass the function as shaping="
        )
    replacements = {} if shaping is None else {"shaping": shaping}
    return algorithm._restored_arguments(SavedModel(str(folder), stored), replacements)
