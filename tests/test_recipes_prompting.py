"""Exact ids and labels of three chat templates and the plain format; packing; greedy answers."""

import pytest
import torch
from packing import PaddingCollator, check_packing, pack
from prompting import IGNORE, PromptEncoder, generate_answers, to_messages
from tiny_text import CHATML, FORGETFUL, GEMMA, LLAMA2, tiny_llama, tokenizer_with
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, GPT2Config

SINGLE = [("user", "hi"), ("assistant", "yo")]
MULTI = [("system", "S"), ("user", "hi"), ("assistant", "yo"), ("user", "and"), ("assistant", "no")]


def conversation(turns) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def expected(tokenizer, *parts: str) -> dict[str, list[int]]:
    """Ids and labels of alternating parts: not learned, learned, not learned, ..."""
    input_ids, labels = [], []
    for index, part in enumerate(parts):
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        input_ids += ids
        labels += ids if index % 2 else [IGNORE] * len(ids)
    return {"input_ids": input_ids, "labels": labels}


CHATML_MULTI = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "yo<|im_end|>",
    "\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n",
    "no<|im_end|>",
    "\n",
)
GEMMA_MULTI = (
    "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "yo<end_of_turn>",
    "\n<start_of_turn>user\nand<end_of_turn>\n<start_of_turn>model\n",
    "no<end_of_turn>",
    "\n",
)
PLAIN_MULTI = (
    "<s>### System:\nS\n\n### Instruction:\nhi\n\n### Response:\n",
    "yo</s>",
    "\n\n### Instruction:\nand\n\n### Response:\n",
    "no</s>",
)


@pytest.mark.parametrize(
    ("template", "turns", "parts", "stop"),
    [
        (
            CHATML,
            SINGLE,
            (
                "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
                "yo<|im_end|>",
                "\n",
            ),
            "<|im_end|>",
        ),
        (CHATML, MULTI, CHATML_MULTI, "<|im_end|>"),
        (LLAMA2, SINGLE, ("<s>[INST] hi [/INST]", " yo </s>"), "</s>"),
        (
            LLAMA2,
            MULTI,
            ("<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nhi [/INST]", " yo </s>", "<s>[INST] and [/INST]", " no </s>"),
            "</s>",
        ),
        (
            GEMMA,
            SINGLE,
            ("<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", "yo<end_of_turn>", "\n"),
            "<end_of_turn>",
        ),
        (GEMMA, MULTI[1:], GEMMA_MULTI, "<end_of_turn>"),
        (None, SINGLE, ("<s>### Instruction:\nhi\n\n### Response:\n", "yo</s>"), "</s>"),
        (None, MULTI, PLAIN_MULTI, "</s>"),
        (FORGETFUL, [*SINGLE, *SINGLE], ("Q:hi\nA:", "y</s>", "Q:hi\nA:", "yo</s>"), "</s>"),
    ],
)
def test_exact_labels_and_prompt(template, turns, parts, stop):
    tokenizer = tokenizer_with(template)
    encoder = PromptEncoder(tokenizer)
    messages = conversation(turns)
    assert encoder.encode(messages) == expected(tokenizer, *parts)
    assert encoder.encode(messages)["input_ids"].count(0) == "".join(parts).count("<s>")  # no second BOS
    assert tokenizer.convert_tokens_to_ids(stop) in encoder.stop_ids
    if template is not FORGETFUL:  # its prompt is another rendering than its training text, by design
        before_last_answer = "".join(parts[: len(parts) - (3 if parts[-1] == "\n" else 2) + 1])
        assert encoder.prompt(messages) == expected(tokenizer, before_last_answer)["input_ids"]


def test_an_end_of_turn_token_that_has_no_name_in_the_tokenizer():
    """Phi-3's <|end|> is such a token: special, but neither eos_token nor one of extra_special_tokens."""
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end not in tokenizer.all_special_ids
    encoder = PromptEncoder(tokenizer)
    labels = encoder.encode(conversation(SINGLE))["labels"]
    assert labels[-2:] == [end, IGNORE] and end in encoder.stop_ids


def test_formats_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="has no chat template.*--prompt_format plain"):
        PromptEncoder(tokenizer_with(), "chat")
    with pytest.raises(ValueError, match="'markdown'; allowed are auto, chat, plain"):
        PromptEncoder(tokenizer_with(), "markdown")
    with pytest.raises(ValueError, match=r"refuses .*\['system', 'user', 'assistant'\]: System role not supported"):
        PromptEncoder(tokenizer_with(GEMMA)).encode(conversation([("system", "S"), *SINGLE]))
    unmarked = FORGETFUL.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match="does not render turn by turn.*generation"):
        PromptEncoder(tokenizer_with(unmarked)).encode(conversation([*SINGLE, *SINGLE]))
    with pytest.raises(ValueError, match="answer mask is all zero"):
        PromptEncoder(tokenizer_with(CHATML)).encode(conversation([("user", "hi")]))


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "p", "completion": "c", "extra": 1}, "p", "c"),
        ({"instruction": "i", "input": "x", "output": "o"}, "i\n\nx", "o"),
        ({"instruction": "i", "input": "", "output": "o"}, "i", "o"),
        ({"question": "q", "answer": "a"}, "q", "a"),
        ({"messages": conversation([("user", "u"), ("assistant", "v")])}, "u", "v"),
    ],
)
def test_columns(row, prompt, answer):
    assert to_messages(row) == conversation([("user", prompt), ("assistant", answer)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "t"}, r"columns \['text'\]; expected one of messages \| prompt\+completion"),
        ({"question": "q", "answer": None}, "'answer' is null, not a string"),
        ({"question": ["q"], "answer": "a"}, "'question' is a list"),
        ({"question": "q", "answer": " \n"}, "an empty answer, so its loss mask would be all zero"),
        ({"messages": conversation([("user", "u")])}, r"no assistant turn \(roles: \['user'\]\)"),
        ({"messages": conversation([("assistant", "u")])}, "begins with the assistant"),
        (
            {"messages": conversation([("tool", "u")])},
            "role 'tool' in 'messages'; allowed are system, user, assistant",
        ),
        ({"messages": "u"}, "column 'messages' is a string"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' is null"),
    ],
)
def test_rows_without_a_conversation_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        to_messages(row)


def examples_of(*lengths: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [IGNORE] * (len(ids) // 3) + ids[len(ids) // 3 :]} for ids in drawn]


def test_pack_fills_rows_and_restarts_positions():
    rows = pack(examples_of(5, 3, 6, 2, 4), max_length=10)
    assert [len(row["input_ids"]) for row in rows] == [10, 10]
    assert [row["position_ids"] for row in rows] == [[*range(6), *range(4)], [*range(5), *range(3), *range(2)]]
    assert rows[0]["labels"][6] == IGNORE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_loss_equals_the_separate_losses(attention):
    model = tiny_llama(attention)
    model.config.use_cache = False  # as Trainer sets it; with a cache transformers does not look for packing
    examples = examples_of(5, 3, 6, 2, 4, 7)
    collate = PaddingCollator(pad_token_id=2)

    def summed_loss_and_gradient(batches):
        model.zero_grad()
        loss = sum(model(**batch, num_items_in_batch=1).loss for batch in batches)
        loss.backward()
        return loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    packed = collate(pack(examples, max_length=10))
    assert set(packed) == {"input_ids", "labels", "position_ids"} and packed["input_ids"].shape == (3, 10)
    loss, gradient = summed_loss_and_gradient([packed])
    for batches in ([collate([example]) for example in examples], [collate(examples)]):
        separate_loss, separate_gradient = summed_loss_and_gradient(batches)
        torch.testing.assert_close(loss, separate_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, separate_gradient, rtol=1e-4, atol=1e-6)
    check_packing(model)


def test_packing_is_refused_where_examples_would_see_each_other(monkeypatch):
    learned_positions = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32))
    check_packing(learned_positions)
    model = tiny_llama()
    forward = model.forward

    def leaking(input_ids, position_ids=None, **options):
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", leaking)
    with pytest.raises(ValueError, match="examples of LlamaForCausalLM see each other.*Leave --packing out"):
        check_packing(model)


def test_answers_are_the_same_alone_and_in_a_padded_batch():
    model, encoder = tiny_llama(), PromptEncoder(tokenizer_with(CHATML))
    conversations = [
        conversation([("user", text), ("assistant", "never shown")]) for text in ("a", "a longer one", "b")
    ]
    together = generate_answers(model, encoder, conversations, max_new_tokens=6, batch_size=3)
    alone = [generate_answers(model, encoder, [messages], max_new_tokens=6)[0] for messages in conversations]
    assert together == alone and all(together) and model.training
