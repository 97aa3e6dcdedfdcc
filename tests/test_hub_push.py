"""Pushing to a stand-in Hub: what arrives there, what is refused before training, what a failed push leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from hub_server import HubServer, Repository
from huggingface_hub import ModelCard
from tiny_text import CHATML, tiny_llama, tokenizer_with
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from peft_zerolock.hub import check_hub_target, clean_card, explain_failed_push

SCRIPT = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, ZeroLockTrainingArguments

out, local_base = sys.argv[1:]
rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 8
ids = torch.tensor([[3, 4, 5, 6]])

def trainer(name, base, **options):
    args = ZeroLockTrainingArguments(f"{out}/{name}", push_to_hub=True, hub_model_id=f"tester/{name}", max_steps=2,
                                     learning_rate=0.1, report_to=[], use_cpu=True, disable_tqdm=True,
                                     save_strategy="no", **options)
    config = ZeroLockConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], num_chunks=2)
    model = AutoModelForCausalLM.from_pretrained(base)
    return ZeroLockTrainer(model=model, args=args, peft_config=config, train_dataset=rows)

result = {}
try:
    trainer("public", "tester/base", hub_private_repo=True)
except ValueError as error:
    result["public"] = str(error)

good = trainer("good", "tester/base", hub_private_repo=True)
good.train()
good.push_to_hub()
trained = good.model.eval()(input_ids=ids).logits
base = AutoModelForCausalLM.from_pretrained("tester/base")
result["moved"] = (base(input_ids=ids).logits - trained).abs().max().item()
loaded = PeftModel.from_pretrained(base, "tester/good").eval()
result["difference"] = (loaded(input_ids=ids).logits - trained).abs().max().item()

broken = trainer("broken", local_base)
broken.train()
try:
    broken.push_to_hub()
except RuntimeError as error:
    result["broken"] = str(error)
kept = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(local_base), f"{out}/broken").eval()
result["kept"] = (kept(input_ids=ids).logits - broken.model.eval()(input_ids=ids).logits).abs().max().item()
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """One process that trains and pushes three times; the outcome, the server's repositories and the folder."""
    folder = tmp_path_factory.mktemp("push")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    with HubServer(failing="/tester/broken/commit/") as hub:
        files = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
        hub.repositories = {"tester/base": Repository(files=files), "tester/public": Repository()}
        root = Path(__file__).parents[1]
        environment = {**hub.environment(folder / "cache"), "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(folder / "base")],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT")), hub, folder


def test_the_repository_holds_an_adapter_that_loads(pushed):
    result, hub, _ = pushed
    repository = hub.repositories["tester/good"]
    assert repository.private
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(repository.files)
    assert json.loads(repository.files["adapter_config.json"])["peft_type"] == "LORA"
    assert result["moved"] > 1e-3 and result["difference"] == 0


def test_the_card_names_the_base_and_no_local_path(pushed):
    _, hub, folder = pushed
    text = hub.repositories["tester/good"].files["README.md"].decode()
    card = ModelCard(text)
    assert card.data["base_model"] == "tester/base" and card.data["library_name"] == "peft"
    assert {"peft", "lora", "zerolock", "base_model:adapter:tester/base"} <= set(card.data["tags"])
    local = (folder / "broken" / "README.md").read_text()
    assert ModelCard(local).data.get("base_model") is None
    for card_text in (text, local):
        assert str(folder) not in card_text


def test_a_private_push_into_a_public_repository_is_refused_before_training(pushed):
    result, hub, folder = pushed
    assert "'tester/public' exists already and is public" in result["public"]
    assert not hub.repositories["tester/public"].files and not (folder / "public" / "adapter_config.json").exists()


def test_a_failed_push_keeps_the_adapter_and_says_how_to_retry(pushed):
    result, hub, folder = pushed
    assert "the push to 'tester/broken' failed" in result["broken"] and "500" in result["broken"]
    assert f"hf upload tester/broken '{folder / 'broken'}'" in result["broken"]
    assert not hub.repositories["tester/broken"].files and result["kept"] == 0


@pytest.fixture
def online(monkeypatch):
    """huggingface_hub of this process speaks to the given server."""

    def speak_to(hub: HubServer, token: str | None = "dummy") -> None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", os.devnull)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)

    return speak_to


def arguments(tmp_path, **options) -> TrainingArguments:
    return TrainingArguments(str(tmp_path / "run"), push_to_hub=True, use_cpu=True, report_to=[], **options)


def test_targets_that_are_accepted(tmp_path, online):
    with HubServer() as hub:
        hub.repositories = {"tester/open": Repository(), "tester/closed": Repository(private=True)}
        online(hub)
        assert check_hub_target(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])) is None
        assert check_hub_target(arguments(tmp_path)) == "tester/run"
        assert check_hub_target(arguments(tmp_path, hub_model_id="new", hub_private_repo=True)) == "tester/new"
        assert check_hub_target(arguments(tmp_path, hub_model_id="tester/open")) == "tester/open"
        assert check_hub_target(arguments(tmp_path, hub_model_id="closed", hub_private_repo=True)) == "tester/closed"
        assert not any(request.startswith("POST") for request in hub.requests)


@pytest.mark.parametrize(
    ("server", "token", "name", "message"),
    [
        ({}, "dummy", "a/b/c", "'a/b/c' is not a repository name"),
        ({}, "dummy", "someone/else", r"'tester' is logged in and may write to tester. Set hub_model_id"),
        ({}, None, "run", r"nobody is logged in. Run `hf auth login`"),
        ({"role": "read"}, "dummy", "run", "the token of 'tester' can only read"),
        ({"failing": "whoami"}, "dummy", "run", r"did not let us check the target .*500"),
    ],
)
def test_targets_that_are_refused(tmp_path, online, server, token, name, message):
    with HubServer(**server) as hub:
        online(hub, token)
        with pytest.raises(ValueError, match=message):
            check_hub_target(arguments(tmp_path, hub_model_id=name))


def test_an_unreachable_hub_is_named_before_training(tmp_path, online):
    with HubServer() as hub:
        online(hub)
    with pytest.raises(ValueError, match=r"the Hub at http://127.0.0.1:\d+ did not let us check"):
        check_hub_target(arguments(tmp_path))


@pytest.mark.parametrize(("base", "kept"), [("org/base", "org/base"), ("{folder}/models/base", None)])
def test_clean_card(tmp_path, base, kept):
    base = base.format(folder=tmp_path)
    head = f"---\nbase_model: {base}\ntags:\n- mine\n- base_model:adapter:{base}\n---\n"
    text = (
        f"A fine-tuned [{base}](https://huggingface.co/{base}), output_dir: {tmp_path}/out, data {tmp_path}/d.jsonl\n"
    )
    (tmp_path / "README.md").write_text(head + text)
    for _ in range(2):  # the second time changes nothing
        clean_card(tmp_path, base, tags=["more"], paths=[f"{tmp_path}/out"])
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.get("base_model") == kept
        relation = [f"base_model:adapter:{kept}"] if kept else []
        assert card.data["tags"] == sorted([*relation, "lora", "mine", "more", "peft", "zerolock"])
        named = "[org/base](https://huggingface.co/org/base)" if kept else "a local model"
        assert card.text.strip() == f"A fine-tuned {named}, output_dir: out, data {tmp_path.name}/d.jsonl"
    clean_card(tmp_path / "without_a_card")


def test_other_errors_pass_through_the_push_guard(tmp_path):
    with pytest.raises(KeyError), explain_failed_push(tmp_path, "a/b"):
        raise KeyError("not the Hub's")
    with pytest.raises(RuntimeError, match="hf upload a/b"), explain_failed_push(tmp_path, "a/b"):
        raise ConnectionError("gone")


def test_a_recipe_pushes_its_adapter(tmp_path):
    """`instruct.py --push_to_hub` from its command line."""
    tiny_llama(blocks=3).save_pretrained(tmp_path / "model")
    tokenizer_with(CHATML).save_pretrained(tmp_path / "model")
    rows = "".join(json.dumps({"prompt": f"say {c}", "completion": c * 3}) + "\n" for c in "abcdefgh")
    (tmp_path / "train.jsonl").write_text(rows)
    root = Path(__file__).parents[1]
    flags = ["--model", "model", "--dataset", "train.jsonl", "--output_dir", "out", "--num_chunks", "3"]
    flags += ["--max_steps", "2", "--report_to", "none", "--use_cpu", "--max_new_tokens", "2", "--num_samples", "1"]
    flags += ["--push_to_hub", "--hub_model_id", "tester/answers", "--logging_steps", "1"]
    with HubServer() as hub:
        run = subprocess.run(
            [sys.executable, str(root / "recipes" / "instruct.py"), *flags],
            env={**hub.environment(tmp_path / "cache"), "PYTHONPATH": str(root)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        files = hub.repositories["tester/answers"].files
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "summary.json", "losses.png"} <= set(
        files
    )
    for name in ("README.md", "summary.json"):
        assert str(tmp_path).encode() not in files[name]
