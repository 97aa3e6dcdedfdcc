"""The quickstart's last step, in a process of its own: the saved adapter in plain PEFT, without peft_zerolock.

Reads a JSON object (``path``, ``gguf_file``, ``dtype``, ``adapter``, ``conversations``,
``max_new_tokens``) from standard input and writes a JSON object with the greedy ``answers`` to standard output.
"""

import json
import sys

from peft import PeftModel
from prompting import PromptEncoder, generate_answers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    """Answers the questions with the adapter."""
    task = json.load(sys.stdin)
    gguf = {"gguf_file": task["gguf_file"]} if task["gguf_file"] else {}
    dequantized = {"quantization_config": GgufConfig(dequantize=True)} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(task["adapter"])
    base = AutoModelForCausalLM.from_pretrained(task["path"], dtype=task["dtype"], **gguf, **dequantized)
    model = PeftModel.from_pretrained(base, task["adapter"])
    answers = generate_answers(
        model, PromptEncoder(tokenizer), task["conversations"], task["max_new_tokens"], batch_size=64
    )
    json.dump({"answers": answers, "used_zerolock": "peft_zerolock" in sys.modules}, sys.stdout)


if __name__ == "__main__":
    main()
