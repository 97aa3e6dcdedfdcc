"""Rows of text to token ids and labels: chat templates, a plain format, answer masks; and greedy answers.

Only the assistant's turns carry labels: each answer with its end-of-turn token, nothing of the prompt. A conversation
is a list of ``{"role": "system" | "user" | "assistant", "content": str}``.
"""

import re
from typing import Any

import torch
from jinja2 import TemplateError
from readers import named

IGNORE = -100
ROLES = ("system", "user", "assistant")
COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
PLAIN_HEADERS = {"system": "### System:\n", "user": "### Instruction:\n", "assistant": "### Response:\n"}


def to_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation that a row holds.

    Accepted columns, in this order: ``messages``; ``prompt`` and ``completion``; ``instruction`` (with ``input``, if
    any) and ``output``; ``question`` and ``answer``.

    Raises:
        ValueError: other columns, a value that is not a string, an unknown role, an empty answer or none at all.
    """
    columns = next((names for names in COLUMNS if all(name in row for name in names)), None)
    if columns is None:
        raise ValueError(
            f"a row has the columns {sorted(row)}; expected one of messages | prompt+completion | "
            "instruction(+input)+output | question+answer. Rename the columns of the data."
        )
    if columns == ("messages",):
        messages = _checked_messages(row["messages"])
    else:
        prompt, answer = _text(row, columns[0]), _text(row, columns[1])
        if columns[0] == "instruction" and row.get("input"):
            prompt = f"{prompt}\n\n{_text(row, 'input')}"
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if messages and messages[0]["role"] == "assistant":
        raise ValueError("the conversation begins with the assistant: no prompt. Begin with a user or system turn.")
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers or not all(answer.strip() for answer in answers):
        given = "an empty answer" if answers else f"no assistant turn (roles: {[m['role'] for m in messages]})"
        raise ValueError(
            f"nothing to learn: the row has {given}, so its loss mask would be all zero. "
            "Give every assistant turn a text, or leave the row out (--skip_bad_rows)."
        )
    return messages


def _checked_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"column 'messages' is {named(value)}; expected a list of {{'role', 'content'}} objects.")
    for message in value:
        if message.get("role") not in ROLES:
            raise ValueError(f"role {message.get('role')!r} in 'messages'; allowed are {', '.join(ROLES)}.")
    return [{"role": message["role"], "content": _text(message, "content")} for message in value]


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        shown = "" if value is None else f" ({value!r:.60})"
        raise ValueError(f"{name!r} is {named(value)}{shown}, not a string. Correct or drop the row.")
    return value


class PromptEncoder:
    """Turns conversations into token ids and labels with one tokenizer and one format.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt_format: "chat" (the tokenizer's chat template), "plain" (``### Instruction:`` / ``### Response:``), or
            "auto": chat where the tokenizer has a template.

    Attributes:
        stop_ids: ids that end an answer, for ``generate(eos_token_id=...)``.
        pad_token_id: the tokenizer's, or a stop id where it has none (padding is never a target here).

    Raises:
        ValueError: "chat" without a chat template, or an unknown format.
    """

    def __init__(self, tokenizer, prompt_format: str = "auto"):
        if prompt_format not in ("auto", "chat", "plain"):
            raise ValueError(f"prompt_format is {prompt_format!r}; allowed are auto, chat, plain.")
        if prompt_format == "chat" and not tokenizer.chat_template:
            raise ValueError(
                f"prompt_format is 'chat', but the tokenizer {type(tokenizer).__name__} has no chat template. "
                "Pass --prompt_format plain, take an instruct model, or set tokenizer.chat_template."
            )
        if prompt_format == "plain" and tokenizer.eos_token_id is None:
            raise ValueError("prompt_format is 'plain', but the tokenizer has no eos_token to end an answer. Set one.")
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) and prompt_format != "plain"
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        probe = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        last = [label for label in probe["labels"] if label != IGNORE][-1]
        stops = {tokenizer.eos_token_id, last if last in self._special_ids else None}
        self.stop_ids = sorted(stops - {None})
        self.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]

    def encode(self, messages: list[dict[str, str]]) -> dict[str, list[int]]:
        """``input_ids`` and ``labels`` (-100 outside the answers) of one conversation, equally long.

        Raises:
            ValueError: the template refuses the conversation, does not render turn by turn, or leaves an empty mask.
        """
        input_ids, spans = self._chat_spans(messages) if self.chat else self._plain_spans(messages)
        labels = [IGNORE] * len(input_ids)
        for start, end in spans:
            labels[start:end] = input_ids[start:end]
        if all(label == IGNORE for label in labels):
            raise ValueError(
                "the answer mask is all zero: no token of this conversation would be learned "
                f"(roles: {[m['role'] for m in messages]}). It needs a non-empty assistant turn."
            )
        return {"input_ids": input_ids, "labels": labels}

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the conversation up to where the assistant's last answer begins (that answer is left out)."""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        asked = messages[: answers[-1]] if answers else messages
        if self.chat:
            return self._render(asked, add_generation_prompt=True)
        return self._plain_spans([*asked, {"role": "assistant", "content": ""}])[0][:-1]

    def _render(self, messages, **options) -> Any:
        try:
            encoded = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template refuses a conversation with the roles {roles}: {error}. "
                "Change the data, or pass --prompt_format plain."
            ) from error
        return encoded if "return_assistant_tokens_mask" in options else list(encoded["input_ids"])

    def _chat_spans(self, messages) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where each answer begins and ends: the difference between two renderings."""
        input_ids = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], add_generation_prompt=True)
            answered = self._render(messages[: index + 1])
            if input_ids[: len(prompt)] != prompt or input_ids[: len(answered)] != answered:
                return self._template_mask(messages)
            spans.append((len(prompt), self._end_of_turn(input_ids, len(prompt), len(answered))))
        return input_ids, spans

    def _end_of_turn(self, input_ids: list[int], start: int, end: int) -> int:
        """`end` without the white space that a template writes after the end-of-turn token."""
        stop = end
        while stop > start and input_ids[stop - 1] not in self._special_ids:
            if self.tokenizer.decode([input_ids[stop - 1]]).strip():
                return end
            stop -= 1
        return stop if stop > start else end

    def _template_mask(self, messages) -> tuple[list[int], list[tuple[int, int]]]:
        if not re.search(r"{%-?\s*generation\s*-?%}", self.tokenizer.chat_template):
            raise ValueError(
                "the chat template does not render turn by turn (the tokens up to an answer are not a prefix of the "
                "whole conversation) and has no {% generation %} mark, so the answers cannot be found exactly. Give "
                "the tokenizer a template with {% generation %}, use single-turn data, or pass --prompt_format plain."
            )
        encoded = self._render(messages, return_assistant_tokens_mask=True)
        mask = encoded["assistant_masks"]
        return list(encoded["input_ids"]), [(index, index + 1) for index, bit in enumerate(mask) if bit]

    def _plain_spans(self, messages) -> tuple[list[int], list[tuple[int, int]]]:
        """Prompts and answers are tokenised apart, so that training and generation see the same prompt tokens."""
        bos = self.tokenizer.bos_token_id
        input_ids = [bos] if bos is not None and self.tokenizer("a")["input_ids"][0] == bos else []
        spans = []
        for index, message in enumerate(messages):
            header = ("\n\n" if index else "") + PLAIN_HEADERS[message["role"]]
            if message["role"] != "assistant":
                input_ids += self._plain_ids(header + message["content"])
                continue
            input_ids += self._plain_ids(header)
            answer = [*self._plain_ids(message["content"]), self.tokenizer.eos_token_id]
            spans.append((len(input_ids), len(input_ids) + len(answer)))
            input_ids += answer
        return input_ids, spans

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def generate_answers(model, encoder: PromptEncoder, conversations, max_new_tokens: int = 64, batch_size: int = 16):
    """Greedy answers to conversations (a last assistant turn is not shown to the model), as a list of strings."""
    tokenizer, training = encoder.tokenizer, model.training
    model.eval()
    answers: list[str] = []
    for start in range(0, len(conversations), batch_size):
        prompts = [encoder.prompt(messages) for messages in conversations[start : start + batch_size]]
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.tensor(
            [[encoder.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device
        )
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_new_tokens,
            eos_token_id=encoder.stop_ids,
            pad_token_id=encoder.pad_token_id,
        )
        answers += [text.strip() for text in tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)]
    model.train(training)
    return answers
