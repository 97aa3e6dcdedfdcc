"""What test_data_parallel.py runs in one process and, by torchrun, in two; not a test itself."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from training import make_trainer, weights
from transformers import EarlyStoppingCallback
from zoo import Rows, token_rows

MASKED = Rows(
    [row if i % 4 < 2 else row | {"labels": [-100] * len(row["labels"])} for i, row in enumerate(token_rows(16).rows)]
)
REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}

RUNS: dict[str, dict[str, Any]] = {
    "three chunks": {"chunks": {"num_chunks": 3}},
    "unsliced": {"chunks": {"num_chunks": 2, "logits_slice": None}},
    "accumulation": {"chunks": {"num_chunks": 3, "alpha": 0.5}, "gradient_accumulation_steps": 2},
    "later blocks, checkpointing": {"chunks": {"num_chunks": 2, "readout": "blocks"}, **REENTRANT},
    "adapter with warm-up": {"chunks": {"num_chunks": 2, "readout": "adapter", "readout_warmup_ratio": 0.5}},
    "classes": {"name": "bert", "task": "SEQ_CLS", "chunks": {"num_chunks": 2}},
    "control": {"chunks": {"num_chunks": 3, "control": True}, "learning_rate": 0.3},
    "own optimizer": {"chunks": {"num_chunks": 2, "readout": "lm_head"}},
    "a process without targets": {"chunks": {"num_chunks": 2}, "data": MASKED, "weight_decay": 0.1},
}


def run_all(folder: Path, processes: int) -> None:
    """Trains every run; the first process writes weights and logs to `folder`."""
    rank = int(os.environ.get("RANK", "0"))
    for name, settings in RUNS.items():
        backend = {"ddp_backend": "gloo"} if processes > 1 else {}
        trainer = make_trainer(
            folder / "out", per_device_train_batch_size=4 // processes, max_steps=3, **backend, **settings
        )
        trainer._get_train_sampler = lambda *_, rows=trainer: torch.utils.data.SequentialSampler(rows.train_dataset)
        if name == "own optimizer":
            learned = [p for p in trainer.model.parameters() if p.requires_grad]
            trainer.optimizer = torch.optim.SGD(learned, lr=0.1)
        if rank == 1:  # the first process's start must win
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1.0)
        trainer.train()
        for mine in weights(trainer).values() if processes > 1 else ():
            first = mine.clone()
            torch.distributed.broadcast(first, src=0)
            assert torch.equal(mine, first), f"{name}: the processes' weights differ"
        if rank == 0:
            losses = [
                {k: v for k, v in row.items() if "loss" in k or "control" in k}
                for row in trainer.state.log_history[:-1]
            ]
            torch.save({"weights": weights(trainer), "losses": losses}, folder / f"{name}.pt")


def run_with_evaluation(folder: Path) -> None:
    """Evaluates before and at every step, stops early, saves, resumes."""
    settings = {
        "chunks": {"num_chunks": 2, "readout": "adapter"},
        "data": token_rows(14),
        "ddp_backend": "gloo",
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "trainer": {"eval_dataset": token_rows(5, seed=4), "callbacks": [EarlyStoppingCallback(6)]},
    }
    trainer = make_trainer(folder / "saved", **settings)
    trainer.evaluate(per_chunk=True)
    trainer.train()
    trainer.save_model()
    longer = {"load_best_model_at_end": False, "max_steps": 8, "trainer": {"eval_dataset": token_rows(5, seed=4)}}
    resumed = make_trainer(folder / "saved", **(settings | longer))
    resumed.train(resume_from_checkpoint=True)
    if trainer.is_world_process_zero():
        report = {"steps": trainer.state.global_step, "resumed": resumed.state.global_step}
        (folder / "saved.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    run_all(target, int(os.environ["WORLD_SIZE"]))
    run_with_evaluation(target)
