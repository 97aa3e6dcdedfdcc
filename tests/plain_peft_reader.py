"""Run as a process of its own: loads saved adapters with plain PEFT alone and writes down what the models answer.

    python plain_peft_reader.py FOLDER

FOLDER/cases.json lists the cases; for each, FOLDER/<case>/ is an adapter and `answers.pt` gets its logits, the dtypes
of its adapter parameters and every warning that was raised. The base model's head has other random weights than the
one that was trained.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import zoo
from peft import PeftModel


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    answers = {}
    for name, case in cases.items():
        base = zoo.make_model(case["model"], case["task"])
        other = zoo.make_model(case["model"], case["task"], seed=77)
        for head in case["heads"]:
            getattr(base, head).load_state_dict(getattr(other, head).state_dict())
        base = base.to(getattr(torch, case["dtype"]))
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            # PEFT reads this attribute of every transformers model, whatever the adapter is.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            model = PeftModel.from_pretrained(base, folder / name).eval()
        batch = torch.load(folder / case["task"] / "batch.pt")
        with torch.no_grad():
            logits = model(**batch).logits
        answers[name] = {
            "logits": logits,
            "dtypes": sorted({str(p.dtype) for n, p in model.named_parameters() if "lora_" in n}),
            "warnings": [f"{w.category.__name__}: {w.message}" for w in raised],
        }
    torch.save(answers, folder / "answers.pt")
    print("imported" if "peft_zerolock" in sys.modules else "not imported")


main(Path(sys.argv[1]))
