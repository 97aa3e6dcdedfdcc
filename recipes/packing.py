"""Several examples in one row without one seeing another, and padding of batches."""

import inspect
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from prompting import IGNORE


def pack(examples: Sequence[dict[str, list[int]]], max_length: int) -> list[dict[str, list[int]]]:
    """Puts several examples into each row of at most `max_length` tokens (best fit, longest first).

    ``position_ids`` start again at 0 with each example: by them transformers builds a block-diagonal attention mask,
    so no example sees another. The first token of an example is never a target: nothing of its own stands before it.
    """
    rows: list[dict[str, list[int]]] = []
    free: list[tuple[int, int]] = []
    for example in sorted(examples, key=lambda example: -len(example["input_ids"])):
        length = len(example["input_ids"])
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, index = free.pop(place)
        else:
            room, index = max_length, len(rows)
            rows.append({"input_ids": [], "labels": [], "position_ids": []})
        rows[index]["input_ids"] += example["input_ids"]
        rows[index]["labels"] += [IGNORE, *example["labels"][1:]]
        rows[index]["position_ids"] += range(length)
        insort(free, (room - length, index))
    return rows


class PaddingCollator:
    """Pads a batch on the right to its longest row: ``input_ids``, ``labels`` (-100) ``(batch, seq)``, int64.

    Unpacked rows get an ``attention_mask``. Packed rows must not have one (transformers then reads the packing from
    ``position_ids``); their padding has position 0 throughout, so that each padding token is a sequence of its own.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        packed = "position_ids" in rows[0]
        batch = {"input_ids": self._padded(rows, "input_ids", self.pad_token_id)}
        batch["labels"] = self._padded(rows, "labels", IGNORE)
        if packed:
            batch["position_ids"] = self._padded(rows, "position_ids", 0)
        else:
            ones = [{"mask": [1] * len(row["input_ids"])} for row in rows]
            batch["attention_mask"] = self._padded(ones, "mask", 0)
        return batch

    @staticmethod
    def _padded(rows, name: str, value: int) -> torch.Tensor:
        tensors = [torch.tensor(row[name], dtype=torch.long) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


@torch.no_grad()
def check_packing(model) -> None:
    """Refuses packing where a packed example could see its neighbour, by comparing with the logits of each alone.

    Raises:
        ValueError: the model takes no ``position_ids``, or its logits change when two examples are packed.
    """
    advice = "Leave --packing out, or load the model with attn_implementation='sdpa' or 'eager'."
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"packing: {type(base).__name__}.forward takes no position_ids. {advice}")
    training = model.training
    model.eval()
    ids = torch.arange(1, 8, device=model.device) % base.get_input_embeddings().num_embeddings
    first, second = ids[None, :4], ids[None, 4:]
    positions = torch.cat([torch.arange(4), torch.arange(3)])[None].to(model.device)
    packed = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in (first, second)], dim=1)
    model.train(training)
    tolerance = 1e-4 if packed.dtype == torch.float32 else 5e-2
    error = (packed - alone).abs().max() / alone.abs().max().clamp(min=1e-6)
    if not error <= tolerance:
        raise ValueError(
            f"packing: examples of {type(base).__name__} see each other (logits differ by {error:.1e}). {advice}"
        )
